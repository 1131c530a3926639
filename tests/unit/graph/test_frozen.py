"""Graphs split by their frozen inputs: what is prepared, and what every call computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from perfuse.graph.fold_norms import fold_norms
from perfuse.graph.frozen import frozen_nodes, mark_frozen, split_frozen
from tests.unit.graph.tracing import calls, traced


def marked(fn: Callable[..., Any], *args: Tensor, frozen: tuple[int, ...]) -> GraphModule:
    module = traced(fn, *args)
    mark_frozen(module, frozen)
    return module


def run_split(module: GraphModule, *args: Tensor) -> Any:
    """Run both halves, one after the other."""
    split = split_frozen(module)
    assert split is not None
    values = split.prepare(*(args[i] for i in split.sources))
    return split.rest(*(args[i] for i in split.passed), *values)


def through_views(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.exp().t() + w.t()[0]


def several_results(x: Tensor, w: Tensor) -> Tensor:
    values, places = w.sort(-1)
    return x * values + places


def shared_view(x: Tensor, w: Tensor) -> Tensor:
    transposed = w.t()
    return x @ transposed + transposed.cos().sum(0)


@pytest.mark.parametrize("fn", [through_views, several_results, shared_view])
def test_halves_compute_the_whole(fn: Callable[..., Any]) -> None:
    x, w = torch.randn(3, 3), torch.randn(3, 3)
    module = marked(fn, x, w, frozen=(1,))
    assert torch.equal(run_split(module, x, w), fn(x, w))


def test_views_stay_in_the_rest() -> None:
    split = split_frozen(marked(through_views, torch.ones(3, 3), torch.ones(3, 3), frozen=(1,)))
    assert split is not None
    assert calls(split.prepare) == ["exp(w_1)"]
    assert split.sources == (1,) and split.passed == (0, 1)


def test_nothing_to_prepare() -> None:
    x, w = torch.ones(3, 3), torch.ones(3, 3)
    assert split_frozen(marked(torch.matmul, x, w, frozen=(1,))) is None
    assert split_frozen(marked(through_views, x, w, frozen=())) is None


def writes(x: Tensor, w: Tensor) -> Tensor:
    result = x + w.exp()
    w.add_(1)
    return result


def test_written_inputs_are_not_frozen() -> None:
    assert not frozen_nodes(marked(writes, torch.ones(3), torch.ones(3), frozen=(1,)))


def draws(x: Tensor, w: Tensor) -> Tensor:
    return x + torch.rand_like(w)


def returns(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, w.exp()


@pytest.mark.parametrize("fn", [draws, returns])
def test_random_numbers_and_results_are_not_prepared(fn: Callable[..., Any]) -> None:
    assert split_frozen(marked(fn, torch.ones(3), torch.ones(3), frozen=(1,))) is None


def scaled(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return (torch.conv2d(x, w) - s) * s / 2 + s


def read_twice(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    result = torch.conv2d(x, w)
    return result * s + result


def by_pixel(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return torch.conv2d(x, w) * s.view(1, 4, 4)


@pytest.mark.parametrize(
    ("fn", "shape", "is_folded"),
    [(scaled, (4, 1, 1), True), (read_twice, (4, 1, 1), False), (by_pixel, (16,), False)],
)
def test_fold(fn: Callable[..., Any], shape: tuple[int, ...], is_folded: bool) -> None:
    x, w, s = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 2, 2), torch.rand(shape) + 0.5
    module = marked(fn, x, w, s, frozen=(1, 2))
    folded = fold_norms(module)
    assert (folded is not module) == is_folded
    torch.testing.assert_close(folded(x, w, s), fn(x, w, s))
    last = [call for call in calls(folded) if "x_1" in call][-1]
    assert last.startswith("convolution")
