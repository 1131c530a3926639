"""Which values of a graph are found to be rounded to eight bits later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perfuse.graph.quantised import rounded_to_eight_bits
from perfuse.graph.simplify import simplify
from tests.unit.graph.tracing import calls, traced

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
X = torch.ones(4, 8, dtype=torch.bfloat16)


def after_a_maximum(x: Tensor) -> Tensor:
    y = x * 2
    return (y / y.abs().amax()).to(E4M3)


def beside(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * 2).to(E4M3), x + 1


def into_memory(x: Tensor) -> Tensor:
    return torch.zeros(4, 8, dtype=torch.int8).copy_(x * 3)


CASES: list[tuple[str, Callable[[Tensor], object], set[str]]] = [
    ("through views and choices", lambda x: (x * 2).t().relu()[1:].to(E4M3), {"mul"}),
    ("the scale too", after_a_maximum, {"mul", "div"}),
    ("integers", lambda x: (x / 3).round().to(torch.uint8), {"div", "round"}),
    ("nothing beside", beside, {"mul"}),
    ("a copy", into_memory, {"mul", "zeros"}),
    ("halves alone", lambda x: (x * 2).to(torch.float32), set()),
    ("wider integers", lambda x: (x * 2).to(torch.int32), set()),
    ("moved, not rounded", lambda x: x.view(torch.uint8).to(torch.int8), set()),
]


@pytest.mark.parametrize(("name", "fn", "expected"), CASES, ids=[c[0] for c in CASES])
def test_found(name: str, fn: Callable[[Tensor], object], expected: set[str]) -> None:
    graph = traced(lambda x: torch.func.functionalize(fn)(x), X).graph
    found = {node.target.overloadpacket.__name__ for node in rounded_to_eight_bits(graph)}
    assert found == expected, graph


def test_a_cast_through_float_stays_written_out() -> None:
    """As one cast between types of eight bits it would be refused."""
    gm = traced(lambda x: x.float().to(E5M2), X.to(E4M3))
    assert len(calls(simplify(gm))) == 2
