"""One matrix for a whole batch of rows: a single matmul, forward and backward, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse
from tests.harness.compare import assert_as_good_as_eager
from tests.unit.lower.samples import f32


def linear_of_transposed(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.silu(x).transpose(1, 2), weight)


def one_left_matrix(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(weight, x)


def calls(fn: Callable[..., Tensor], *args: Tensor) -> list[list[str]]:
    explained = perfuse.explain(fn, *args)
    return [[call.op for call in graph.calls] for graph in explained.graphs]


def check(fn: Callable[..., Tensor], *args: Tensor, dynamic: bool | None = None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="perfuse", dynamic=dynamic)

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        own = [a.detach().to(dtype).requires_grad_() for a in args]
        out = function(*own)
        cotangent = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(dtype)
        return [out.detach(), *torch.autograd.grad(out, own, cotangent)]

    dtype = args[0].dtype
    assert_as_good_as_eager(run(compiled, dtype), run(fn, dtype), run(fn, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(3, 20, 7, 33), (2, 16, 16, 64), (1, 8, 5, 40), (4, 9, 6, 3)])
@pytest.mark.parametrize("fn", [linear_of_transposed, one_left_matrix])
def test_as_eager(
    fn: Callable[..., Tensor], sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    batch, channels, tokens, results = sizes
    check(fn, f32(batch, channels, tokens).to(dtype), f32(results, channels).to(dtype))


@pytest.mark.parametrize("fn", [linear_of_transposed, one_left_matrix])
def test_sizes_that_change(fn: Callable[..., Tensor]) -> None:
    check(fn, f32(3, 20, 7), f32(33, 20), dynamic=True)


def test_the_weight_is_not_repeated() -> None:
    """Nor are the products of a sum over the batch stored."""
    x, weight = f32(4, 16, 8).double(), f32(64, 16).double()  # no library competes for doubles
    assert calls(linear_of_transposed, x, weight) == [["aten.mm.out"]]
    training = calls(linear_of_transposed, x.requires_grad_(), weight.requires_grad_())
    assert training == [["aten.mm.out"], ["aten.mm.out"] * 2]
    plan = str(perfuse.explain(one_left_matrix, x.detach(), weight.detach()).stage("plan"))
    assert "map(" not in plan, plan


def test_few_columns_are_not_worth_a_copy_of_the_rows() -> None:
    x, weight = f32(4, 16, 8), f32(2, 16)
    with torch.no_grad():
        assert calls(linear_of_transposed, x, weight) == [["aten.bmm.out"]]
