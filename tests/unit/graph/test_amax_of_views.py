"""Scales of views are those of the tensor, only in programs with FP8 values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perfuse.graph.amax_of_views import amax_of_views
from tests.unit.graph.tracing import calls, traced

SMALL = torch.float8_e4m3fn


def scaled(x: Tensor, view: Callable[[Tensor], Tensor], dtype: torch.dtype = SMALL) -> Tensor:
    return (x * view(x).abs().max()).to(dtype)


VIEWS = [
    lambda x: x.reshape(-1),
    lambda x: x.t(),
    lambda x: x.permute(1, 0).unsqueeze(0),
]


@pytest.mark.parametrize("view", VIEWS)
def test_the_maximum_is_that_of_the_tensor(view: Callable[[Tensor], Tensor]) -> None:
    gm = amax_of_views(traced(lambda x: scaled(x, view), torch.randn(4, 6)))
    assert "abs(x_1)" in str(calls(gm)), calls(gm)


@pytest.mark.parametrize("view", [lambda x: x[1:], lambda x: x * 2])
def test_other_values_stay(view: Callable[[Tensor], Tensor]) -> None:
    gm = traced(lambda x: scaled(x, view), torch.randn(4, 6))
    assert calls(amax_of_views(gm)) == calls(gm)


def test_programs_without_floats_of_eight_bits_stay() -> None:
    gm = traced(lambda x: scaled(x, torch.t, torch.bfloat16), torch.randn(4, 6))
    assert amax_of_views(gm) is gm
