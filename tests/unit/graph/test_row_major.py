"""Values that eager makes contiguous are computed contiguous, and nobody sees other strides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.context import Context
from perfuse.graph.row_major import lay_row_major
from tests.harness.compare import assert_as_good_as_eager
from tests.unit.graph.tracing import traced


def stem(x: Tensor, w: Tensor, place: Tensor) -> Tensor:
    return F.conv1d(x, w).tanh().transpose(1, 2) + place


def encoder(x: Tensor, w: Tensor, place: Tensor, first: Tensor, second: Tensor) -> Tensor:
    hidden = stem(x, w, place)
    hidden = hidden + F.layer_norm(hidden, [8]) @ first
    hidden = hidden + F.layer_norm(hidden, [8]) @ second
    return F.layer_norm(hidden, [8])


def shown(*given: Tensor) -> tuple[Tensor, Tensor]:
    """A sum whose strides the caller sees."""
    hidden = stem(*given)
    return hidden, F.layer_norm(hidden, [8])


GIVEN = tuple(torch.randn(s) for s in ((2, 4, 7), (8, 4, 1), (7, 8), (8, 8), (8, 8)))


def test_sums_are_contiguous() -> None:
    module = traced(encoder, *GIVEN, decompose=True)
    made = lay_row_major(module, Context.default())
    sums = made.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    whole = [n for n in sums if n.meta["val"].shape == (2, 7, 8)]
    assert [n.meta["val"].is_contiguous() for n in whole] == [False, *[True] * (len(whole) - 1)]
    assert_as_good_as_eager(made(*GIVEN), encoder(*GIVEN), encoder(*(t.double() for t in GIVEN)))


def test_strides_that_are_seen_stay() -> None:
    module = traced(shown, *GIVEN[:3], decompose=True)
    assert lay_row_major(module, Context.default()) is module


def views(*given: Tensor) -> Tensor:
    hidden = stem(*given)
    return F.layer_norm(hidden, [8]) + hidden.transpose(1, 2).flip(1).transpose(1, 2)


def test_values_of_views_stay() -> None:
    module = traced(views, *GIVEN[:3], decompose=True)
    assert lay_row_major(module, Context.default()) is module


@pytest.mark.parametrize("function, count", [(encoder, 5), (shown, 3), (views, 3)])
def test_training(function, count: int) -> None:
    def results(run) -> list[Tensor]:
        given = [t.clone().requires_grad_() for t in GIVEN[:count]]
        found = run(*given)
        found = found if isinstance(found, tuple) else (found,)
        gradients = torch.autograd.grad(sum(f.sin().sum() for f in found), given)
        return [*(f.detach() for f in found), *gradients]

    compiled = results(torch.compile(function, backend="perfuse"))
    for got, want in zip(compiled, results(function), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
