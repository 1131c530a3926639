"""Kernels of sizes that change compile for a GPU: positions of 64 bits beside those of 32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import perfuse
from tests.behaviour.test_dynamic import FUNCTIONS

TARGET = "cuda:90"


def _with_fixed_columns(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """As the automatic mode has it once a second number of rows was met."""

    def fixed(x: Tensor) -> Tensor:
        assert x.shape[1] == 6
        return function(x)

    return fixed


@pytest.mark.parametrize("is_automatic", (False, True), ids=("dynamic", "automatic"))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_changing_sizes_compile(function: Callable[[Tensor], Tensor], is_automatic: bool) -> None:
    chosen = _with_fixed_columns(function) if is_automatic else function
    x = torch.empty(13, 6, device="meta")
    made = perfuse.codegen_for(chosen, (x,), target=TARGET, dynamic=True)
    assert made.objects
    assert any("n0" in graph.kernels for graph in made.graphs)


def statistics_of_a_constant(x: Tensor) -> list[Tensor]:
    ones = x.new_ones(x.shape[-3], 2)
    mean = torch.var_mean(ones, dim=-2, correction=0)[1]
    normal = torch.log_softmax(ones * 0.5, dim=0)
    return [mean, normal.sum(), torch.fmod(ones, 3), ones, normal]


def columns_and_all(x: Tensor) -> list[Tensor]:
    assert x.shape[1] == 1024
    wide = x * 2 + 1
    return [wide.sum(0), wide.abs().amax(), wide]


@pytest.mark.parametrize(
    ("function", "shape"), ((statistics_of_a_constant, (16, 64, 2)), (columns_and_all, (48, 1024)))
)
def test_reductions_down_columns_compile(
    function: Callable[[Tensor], list[Tensor]], shape: tuple[int, ...]
) -> None:
    """Of values that are the same everywhere, and of columns together with the whole."""
    x = torch.empty(shape, device="meta")
    assert perfuse.codegen_for(function, (x,), target=TARGET, dynamic=True).objects
