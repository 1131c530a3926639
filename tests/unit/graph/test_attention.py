"""Attention by hand: which forms become the fused kernel, with eager's values and its NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import perfuse
from perfuse.graph import attention_match
from tests.harness.compare import assert_as_good_as_eager
from tests.unit.graph.tracing import after_passes, calls, traced

INF = float("inf")
SIZES = (2, 3, 9, 16)  # sequences, heads, rows, head size
Attend = Callable[..., Any]


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sequences, heads, rows, size = SIZES
    shapes = [(sequences, heads, n, size) for n in (rows, rows + 4, rows + 4)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def weights(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(q, k) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / 4.0 + mask, -1) @ v


def mask_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(mask + q @ k.transpose(-1, -2) / 4.0, -1) @ v


def three_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT).mul(0.3), dim=2), v)


def three_axes_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.mT) + mask, dim=2), v)


def heads_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As models have it: heads are split out of the rows, and joined again."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return plain(q, k, v).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * 0.25
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def shared_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :1].expand(x.shape) for x in (k, v))
    return plain(q, k, v)


def transposed_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys that lie in memory as the product wants them, which the kernel does not."""
    return torch.softmax(q @ k.mT.contiguous().sin(), -1) @ v


def two_masks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """As MPNet has it: a bias by distance, then the mask."""
    return torch.softmax(q @ k.transpose(-1, -2) / 4.0 + bias + mask, -1) @ v


def masked_then_scaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As CodeGen has it: what scales the scores scales the mask."""
    return torch.softmax((q @ k.transpose(-1, -2) + mask) / 4.0, -1) @ v


def of_both_kinds(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """As Falcon has it."""
    return torch.softmax((bias + q @ k.mT * 0.5) * 0.25 + mask, -1) @ v


FORMS: list[tuple[Attend, tuple[Tensor, ...]]] = [
    (plain, ()),
    (three_axes, ()),
    (heads_inside, ()),
    (shared_keys, ()),
    (transposed_keys, ()),
    (lambda q, k, v: torch.softmax((q * 0.5) @ (k * 0.5).mT, -1) @ v, ()),
    (lambda q, k, v: torch.softmax(q @ (k.mT / math.sqrt(16)), -1) @ v, ()),
    (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, ()),
    (lambda q, k, v: (q / 4) @ (q / 4).mT + 0 * q[..., :1] + plain(q, k, v)[..., :9], ()),
    (masked, (noise(13),)),
    (masked, (noise(9, 13),)),
    (masked, (noise(1, 13),)),
    (masked, (noise(9, 1),)),
    (masked, (noise(3, 9, 13),)),
    (masked, (noise(2, 1, 1, 13),)),
    (masked, (noise(2, 3, 9, 13),)),
    (masked, (noise(13, 9).t(),)),
    (mask_first, (noise(2, 1, 9, 13),)),
    (three_axes_masked, (noise(6, 9, 13),)),
    (three_axes_masked, (noise(9, 13),)),
    (two_masks, (noise(1, 3, 9, 13), noise(2, 1, 1, 13))),
    (masked_then_scaled, (noise(2, 1, 9, 13),)),
    (of_both_kinds, (noise(3, 1, 13), noise(2, 1, 9, 13))),
]

NO_MATCHES: list[tuple[Attend, tuple[Tensor, ...]]] = [
    (lambda q, k, v: (plain(q, k, v), weights(q, k)), ()),  # the weights are wanted as well
    (lambda q, k, v: torch.softmax(q @ k.mT, -2) @ v, ()),  # over the queries
    (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v[..., :5], ()),  # heads of two sizes
    (lambda q, k, v: torch.softmax(-1 * (q @ k.mT), -1) @ v, ()),
    (lambda q, k, v: torch.softmax((q @ k.mT).relu(), -1) @ v, ()),
    (
        lambda q, k, v, m: torch.softmax((q @ k.mT).masked_fill(m > 0, -INF), -1) @ v,
        (noise(9, 13),),
    ),
    (lambda q, k, v, m: torch.softmax(q @ k.mT * m, -1) @ v, (noise(9, 13),)),
    # A mask of the scores' size, computed for them alone.
    (lambda q, k, v, m: torch.softmax(q @ k.mT + m.exp(), -1) @ v, (noise(2, 3, 9, 13),)),
]


def num_kernels(module: GraphModule) -> int:
    return sum(call.startswith("_scaled_dot_product_flash") for call in calls(module))


def passed(fn: Attend, *args: Tensor) -> GraphModule:
    return after_passes(traced(fn, *args, decompose=True))


def check(got: Any, fn: Attend, *args: Tensor) -> None:
    exact = fn(*[x.double() if x.is_floating_point() else x for x in args])
    assert_as_good_as_eager(got, fn(*args), exact)


@pytest.mark.parametrize("fn, more", FORMS)
def test_is_one_kernel(fn: Attend, more: tuple[Tensor, ...]) -> None:
    args = (*operands(), *more)
    module = passed(fn, *args)
    assert num_kernels(module) == 1, module.code
    (got,) = [module(*args)]
    check(got, fn, *args)
    assert got.stride() == fn(*args).stride()


@pytest.mark.parametrize("fn, more", NO_MATCHES)
def test_stays_by_hand(fn: Attend, more: tuple[Tensor, ...]) -> None:
    args = (*operands(), *more)
    module = passed(fn, *args)
    assert num_kernels(module) == 0
    check(module(*args), fn, *args)


@pytest.mark.parametrize(
    "has_products, kernel, count",
    [(False, "library", 1), (True, "library", 0), (True, "kernel", 1)],
)
@pytest.mark.parametrize("fn", [plain, in_float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_where_the_library_is_slow(
    dtype: torch.dtype, fn: Attend, has_products: bool, kernel: str, count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Either its matmuls, or, beside a generated kernel, both ways."""
    monkeypatch.setattr(attention_match, "has_fast_matmuls", lambda _: has_products)
    args = operands(dtype)
    with perfuse.config.patch({"cpu.attention": kernel}):
        module = passed(fn, *args)
    assert num_kernels(module) == count
    check(module(*args), fn, *args)


@pytest.mark.parametrize("value", [-INF, INF, math.nan, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("shape", [(9, 13), (2, 1, 9, 13)])
def test_a_row_of_the_mask_is_as_by_hand(value: float, shape: tuple[int, ...]) -> None:
    mask = noise(*shape)
    mask[..., 0, :] = value
    mask[..., 1, 3] = value
    args = (*operands(), mask)
    module = passed(masked, *args)
    assert num_kernels(module) == 1
    check(module(*args), masked, *args)


def test_rows_that_masks_hide_together() -> None:
    """Two of the lowest numbers are -inf, and a row of those is NaN by hand."""
    low = torch.finfo(torch.float32).min
    bias, mask = noise(1, 3, 9, 13), torch.where(noise(2, 1, 9, 13) > 0, 0.0, low)
    bias[:, :, 2] = low
    mask[:, :, 2] = low
    args = (*operands(), bias, mask)
    module = passed(two_masks, *args)
    assert num_kernels(module) == 1
    got = module(*args)
    assert got[:, :, 2].isnan().all()
    torch.testing.assert_close(got, two_masks(*args), equal_nan=True)


@pytest.mark.parametrize("number, is_checked", [(-1e9, False), (-INF, True)])
def test_rows_are_looked_at_where_one_could_be_hidden(number: float, is_checked: bool) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        zero, low = torch.zeros(()), torch.full((), number)
        return masked(q, k, v, torch.where(keep, zero, low)[:, None, None, :])

    keep = noise(2, 13) > 0
    keep[1] = False
    args = (*operands(), keep)
    module = passed(fn, *args)
    assert num_kernels(module) == 1
    assert any("amax" in call for call in calls(module)) == is_checked
    check(module(*args), fn, *args)


def test_not_behind_a_write() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.ops.aten.copy_(q, k[:, :, :9])
        return plain(q, k, v)

    assert num_kernels(passed(fn, *operands())) == 0


@pytest.mark.parametrize("fn", [plain, heads_inside, masked])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(fn: Attend, dynamic: bool) -> None:
    compiled = torch.compile(fn, backend="perfuse", dynamic=dynamic)
    more = (noise(9, 13),) if fn is masked else ()
    args = (*operands(), *more)
    with torch.no_grad():
        check(compiled(*args), fn, *args)
    assert "perfuse.attention" in str(perfuse.explain(fn, *args).stage("plan"))


def test_gradients_are_by_hand() -> None:
    args = [x.requires_grad_() for x in operands()]
    expected = torch.autograd.grad(plain(*args).square().sum(), args)
    wide = [x.detach().double().requires_grad_() for x in args]
    exact = torch.autograd.grad(plain(*wide).square().sum(), wide)
    got = torch.autograd.grad(torch.compile(plain, backend="perfuse")(*args).square().sum(), args)
    assert_as_good_as_eager(got, expected, exact)
