"""Canonical text: equal graphs have equal text, and what text cannot say is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from perfuse.graph.canonical import NotCanonical, aten_text, spell


def graph(function: Callable[..., Any], *args: Any) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


X = torch.zeros(3, 4)

DIFFERENT = {
    "op": lambda x: x.sin(),
    "constant": lambda x: x + 2,
    "float constant": lambda x: x + 2.0,
    "true": lambda x: x + True,
    "order": lambda x: (x + 1) * 2,
    "order again": lambda x: (x * 2) + 1,
    "dtype": lambda x: x.to(torch.float64),
    "list": lambda x: x.sum([0]),
    "negative": lambda x: x.sum([-2]),
    "two": lambda x: (x.sin(), x.cos()),
    "two swapped": lambda x: (x.cos(), x.sin()),
}


def test_equal_graphs_have_equal_text() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).softmax(-1)

    assert aten_text(graph(function, X)) == aten_text(graph(function, X))


def test_different_graphs_have_different_text() -> None:
    texts = {name: aten_text(graph(function, X)) for name, function in DIFFERENT.items()}
    assert len(set(texts.values())) == len(texts)


@pytest.mark.parametrize("other", [X.double(), X.t(), torch.zeros(4, 3), X.int()], ids=str)
def test_inputs_are_part_of_the_text(other: torch.Tensor) -> None:
    assert aten_text(graph(torch.neg, X)) != aten_text(graph(torch.neg, other))


def test_what_text_cannot_say_is_refused() -> None:
    for value in (torch.Generator(), object(), lambda: 0, torch.zeros(2)):
        with pytest.raises(NotCanonical):
            spell(value, {})


def test_values_of_different_types_differ() -> None:
    values = (1, 1.0, True, "1", (1,), [1], {"1": 1}, None, ..., slice(1), torch.float32, -0.0, 0.0)
    assert len({spell(value, {}) for value in values}) == len(values)
