"""Tiny matmuls with constants become one batched matmul in what torch.compile captures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import perfuse
from tests.unit.lower.samples import f32


def with_literals(x: Tensor) -> Tensor:
    a, b, c = (torch.tensor([[1.0, 2.0], [3.0, n]]) for n in (4.0, 5.0, 6.0))
    return (x @ a).relu() + (x @ b).sigmoid() + (x @ c).tanh()


def with_folded(x: Tensor) -> Tensor:
    angles = torch.arange(2.0)[:, None] * torch.arange(2.0)
    a, b = torch.cos(angles), torch.sin(angles)
    return (x @ a).relu() + (x @ b).sigmoid() + (x @ torch.eye(2)).tanh()


@pytest.mark.parametrize("fn", [with_literals, with_folded])
def test_constants_are_stacked(fn: Callable[[Tensor], Tensor]) -> None:
    x = f32(3, 2)
    explained = perfuse.explain(fn, x)
    assert [call.op for graph in explained.graphs for call in graph.calls] == ["aten.bmm.out"]
    torch.testing.assert_close(torch.compile(fn, backend="perfuse")(x), fn(x))


def test_parameters_are_not_stacked() -> None:
    layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(3)]
    x = f32(3, 2)
    explained = perfuse.explain(lambda x: sum(layer(x).relu() for layer in layers), x)
    assert {call.op for call in explained.graphs[0].calls} == {"aten.mm.out"}
