"""Explanations of values that are not plain tensors: every graph that runs can be explained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import perfuse

SQUARE = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: torch.fft.fft(x).abs().cumsum(0), "aten._fft_r2c"),
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) * 2, "cond"),
    ],
    ids=["complex", "cond"],
)
def test_opaque_values_are_printed(function: Callable[[Tensor], Any], named: str) -> None:
    with perfuse.testing.fresh_cache():
        assert named in str(perfuse.explain(function, SQUARE))
