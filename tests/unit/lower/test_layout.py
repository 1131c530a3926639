"""Which strides a result gets: eager's, whether its sizes are numbers or symbols."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perfuse.ir import index as ix
from perfuse.lower.layout import dense, own_strides
from tests.harness.backend import compiled

N, M = ix.symbol("n", 2), ix.symbol("m", 2)


def test_dense_in_any_order_of_axes() -> None:
    for strides in ((M, 1), (1, N)):
        assert dense((N, M), strides) == strides
    assert dense((N, M, 4), (ix.mul(M, 4), 1, M)) == (ix.mul(M, 4), 1, M)
    assert dense((3, 4), (1, 3)) == (1, 3)
    assert dense((3, 1, 4), (1, 7, 3)) == (1, 7, 3)


def test_gaps_and_overlaps_are_not_dense() -> None:
    assert dense((N, M), (ix.mul(M, 2), 1)) is None
    assert dense((N, M), (1, 1)) is None
    assert dense((3, 4), (8, 2)) is None


def test_own_strides_keep_gaps() -> None:
    assert own_strides((N, M), (ix.mul(M, 2), 2)) == (ix.mul(M, 2), 2)
    assert own_strides((3, 4), (8, 2)) == (8, 2)
    assert own_strides((N, 3), (1, 1)) is None
    assert own_strides((4, 3), (1, 1)) is None


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().exp(),
    "sliced": lambda x: torch.sort(x[1:-1, ::2].t(), 0)[0] * 2,
    "window": lambda x: (x.cumsum(0) * 2).t()[::2],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strides_of_results_are_those_of_eager(name: str) -> None:
    torch._dynamo.reset()
    run = compiled(FUNCTIONS[name], dynamic=True)
    for shape in ((6, 8), (5, 7), (9, 9)):
        x = torch.randn(shape)
        got, eager = run(x), FUNCTIONS[name](x)
        assert got.stride() == eager.stride()
        torch.testing.assert_close(got, eager)


@torch.library.custom_op("perfuse_tests::in_memory_order", mutates_args=())
def in_memory_order(tensors: list[Tensor]) -> Tensor:
    """The elements of the first tensor as they lie in memory."""
    return tensors[0].as_strided((tensors[0].numel(),), (1,)).clone()


@in_memory_order.register_fake
def _(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty(tensors[0].numel())


def listed(x: Tensor) -> Tensor:
    return in_memory_order([x.contiguous()])


def branched(x: Tensor) -> Tensor:
    def doubled(y: Tensor) -> Tensor:
        return y.view(-1) * 2

    def tripled(y: Tensor) -> Tensor:
        return y.view(-1) * 3

    return torch.cond(x.sum() > 0, doubled, tripled, (x.contiguous(),))


@pytest.mark.parametrize("fn", [listed, branched])
def test_tensors_in_lists_have_the_strides_that_were_traced(fn: Callable[[Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert torch.equal(compiled(fn, "perfuse")(x), fn(x))
