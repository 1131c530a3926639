"""Floats of eight bits compiled for GPUs with and without hardware for them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import perfuse
from tests.harness.float8 import (
    E4M3,
    FLOAT8,
    WIDE,
    by_axis,
    by_blocks_of_a_row,
    by_square_blocks,
    with_transpose,
)

TARGETS = ("cuda:90", "cuda:80", "hip:gfx942")


def every_cast(*wide: Tensor) -> list[Tensor]:
    return [x.to(dtype).to(x.dtype) for x in wide for dtype in FLOAT8]


@pytest.mark.parametrize("target", TARGETS)
def test_every_cast_compiles(target: str) -> None:
    inputs = tuple(torch.empty(4096, dtype=dtype, device="meta") for dtype in WIDE)
    made = perfuse.codegen_for(every_cast, inputs, target=target)
    assert made.objects
    has_hardware = any("cvt.rn.satfinite.e4m3x2" in t for g in made.graphs for t in g.assembly)
    assert has_hardware == (target == "cuda:90")


@pytest.mark.parametrize("target", TARGETS)
def test_one_launch_for_each_scale_that_a_block_can_know(target: str) -> None:
    x = torch.empty(2048, 2048, dtype=torch.bfloat16, device="meta")
    for function in (partial(by_axis, axis=-1), by_blocks_of_a_row, by_square_blocks):
        made = perfuse.codegen_for(function, (x,), target=target)
        assert len(made.objects) == 1, function


def test_the_transposed_copy_is_written_by_the_same_launch() -> None:
    x = torch.empty(2048, 2048, dtype=torch.bfloat16, device="meta")
    made = perfuse.codegen_for(
        with_transpose, (x, torch.empty((), device="meta")), target="cuda:90"
    )
    assert len(made.objects) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_a_cast_that_may_overflow_is_not_left_to_the_hardware(target: str) -> None:
    """It saturates and forgets the sign of NaN; a clamp before the cast makes both right."""
    x = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    casts = {"plain": lambda x: x.to(E4M3), "clamped": lambda x: x.clamp(-448, 448).to(E4M3)}
    texts = {
        name: perfuse.codegen_for(cast, (x,), target=target).graphs[0].kernels
        for name, cast in casts.items()
    }
    is_native = target == "cuda:90"
    assert ("pf_near_f8e4m3fn(" in texts["plain"]) == is_native
    assert ("pf_to_f8e4m3fn(" in texts["clamped"]) == (not is_native)
    assert "pf_near_f8e4m3fn(" not in texts["clamped"]
