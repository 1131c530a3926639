"""The last axis is split where an index divides it, so that lanes read contiguous memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perfuse.ir import index as ix
from perfuse.schedule.plan import Plan
from tests.unit.planning import gpu_context, plans_of


def joined_heads(x: Tensor) -> Tensor:
    """(batch, heads, length, head) as (batch * length, heads * head)."""
    batch, heads, length, head = x.shape
    return x.transpose(1, 2).reshape(batch * length, heads * head) + 1


def summed_heads(x: Tensor) -> Tensor:
    return joined_heads(x).sum(1)


def normalised_heads(x: Tensor) -> Tensor:
    return torch.softmax(joined_heads(x), 1)


def best_heads(x: Tensor) -> Tensor:
    return joined_heads(x).argmax(1)


def masked_heads(x: Tensor) -> Tensor:
    y = joined_heads(x)
    at = torch.arange(y.shape[1])
    return torch.where(at[None, :] <= at[: y.shape[0], None] * 3, y, 0)


def num_uneven(plan: Plan) -> int:
    """The reads that the last axis of their kernel does not step through evenly."""
    found = 0
    for kernel in plan.kernels:
        atom = kernel.axes[-1].atom if kernel.axes else None
        for read in (r for m in kernel.members for r in m.loop.reads()):
            found += atom is not None and ix.coefficient_of(read.index, atom) is None
    return found


def assert_as_good_as_eager(got: Tensor, eager: Tensor, exact: Tensor) -> None:
    """At most twice eager's error, plus a rounding of the result; integers are equal."""
    assert got.dtype == eager.dtype and got.shape == eager.shape
    if not got.is_floating_point():
        assert torch.equal(got, eager)
        return
    if got.dtype is torch.float64:  # there is no wider type to tell which of the two is closer
        torch.testing.assert_close(got, eager)
        return
    rounding = torch.finfo(got.dtype).eps * exact.abs().max()
    limit = 2 * (eager.double() - exact).abs().max() + rounding
    assert (got.double() - exact).abs().max() <= limit


PROGRAMS = [joined_heads, summed_heads, normalised_heads, best_heads, masked_heads]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("shape", [(4, 4, 64, 64), (2, 3, 7, 20), (1, 5, 33, 12)])
def test_no_index_divides_the_last_axis(
    program: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    (plan,) = plans_of(program, torch.randn(shape))
    assert num_uneven(plan) == 0, str(plan)


def test_kernels_of_a_gpu_keep_their_axes() -> None:
    (plan,) = plans_of(joined_heads, torch.randn(4, 4, 64, 64), context=gpu_context("sm_90"))
    (kernel,) = plan.kernels
    assert len(kernel.axes) == 2, str(plan)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_are_those_of_eager(
    program: Callable[[Tensor], Tensor], dtype: torch.dtype, dynamic: bool
) -> None:
    if program is normalised_heads and not dtype.is_floating_point:
        pytest.skip("softmax is of floats")
    torch._dynamo.reset()
    torch.manual_seed(0)  # a draw may have maxima that only eager's rounding makes equal
    compiled = torch.compile(program, backend="perfuse", dynamic=dynamic)
    for shape in [(4, 4, 64, 64), (2, 3, 7, 20), (1, 5, 33, 12), (2, 2, 5, 37)]:
        x = (torch.randn(shape) * 8).to(dtype)
        assert_as_good_as_eager(compiled(x), program(x), program(x.double()))


def crossed_heads(x: Tensor) -> Tensor:
    """Heads inside of what each of them has, as the operand of an einsum may need them."""
    batch, heads, length, head = x.shape
    return x.permute(2, 0, 3, 1).reshape(length * batch, head * heads) + 1


def turned_heads(x: Tensor) -> Tensor:
    """The same of a weight, whose rows become columns."""
    batch, heads, length, head = x.shape
    return x.permute(3, 1, 2, 0).reshape(head * heads, length * batch) * 2


@pytest.mark.parametrize("program", [crossed_heads, turned_heads])
def test_maps_divide_no_axis(program: Callable[[Tensor], Tensor]) -> None:
    (plan,) = plans_of(program, torch.randn(4, 4, 64, 64))
    assert "//" not in str(plan) and "%" not in str(plan), str(plan)
    (kernel,) = plan.kernels
    assert kernel.axes[-1].size >= 8


@pytest.mark.parametrize("program", [crossed_heads, turned_heads])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maps_of_any_size(program: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="perfuse")
    for shape in [(4, 4, 64, 64), (2, 3, 5, 4), (3, 2, 9, 17)]:  # the last two: sizes are symbols
        x = torch.randn(shape).to(dtype)
        assert_as_good_as_eager(compiled(x), program(x), program(x.double()))
