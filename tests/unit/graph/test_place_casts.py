"""Casts to a narrower type are made once, and before parts are joined."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perfuse.graph.cse import eliminate_common_subexpressions
from perfuse.graph.place_casts import place_casts
from tests.harness.backend import compiled
from tests.unit.graph.tracing import calls, traced

HALF = torch.bfloat16


def names(fn: Callable[..., object]) -> list[str]:
    gm = eliminate_common_subexpressions(place_casts(traced(fn, torch.randn(4, 6))))
    gm(torch.randn(4, 6))
    return [call.partition("(")[0] for call in calls(gm)]


def test_parts_are_cast_before_they_are_joined() -> None:
    found = names(lambda x: torch.cat([x, x * 2], 1).to(HALF).mm(torch.ones(12, 3, dtype=HALF)))
    assert found.index("_to_copy") < found.index("cat")


def test_a_view_may_be_between() -> None:
    found = names(lambda x: torch.cat([x, x * 2]).view(2, 24).t().to(HALF).exp())
    assert found.index("cat") < found.index("view") and found.count("_to_copy") == 2


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x.view(24), lambda x: x[None].mT])
@pytest.mark.parametrize("is_first", [False, True])
def test_views_share_a_cast(view: Callable[[Tensor], Tensor], is_first: bool) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        if is_first:
            return view(x).to(HALF).exp(), x.to(HALF).sin()
        return x.to(HALF).sin(), view(x).to(HALF).exp()

    assert names(function).count("_to_copy") == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.t().to(HALF).exp(),  # one cast
        lambda x: (x.to(HALF).exp(), x[1:].to(HALF).exp()),  # of other elements
        lambda x: torch.cat([x, x]).double().exp(),  # a wider type
        lambda x: torch.cat([x, x]).to(HALF),  # a result
        lambda x: torch.cat([x, x.half()]).to(HALF).exp(),  # parts that are converted
    ],
)
def test_other_casts_stay(fn: Callable[[Tensor], object]) -> None:
    gm = traced(fn, torch.randn(4, 6))
    assert place_casts(gm) is gm


def test_values_and_strides_are_those_of_eager() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        joined = torch.cat([x[:, :2], x.sin()], 1)
        return joined.to(HALF) * 2, joined.t().to(HALF) + 1, x.to(HALF).exp(), x.t().to(HALF).cos()

    x = torch.randn(6, 8)
    for got, wanted in zip(compiled(function)(x), function(x), strict=True):
        assert got.stride() == wanted.stride()
        torch.testing.assert_close(got, wanted)
