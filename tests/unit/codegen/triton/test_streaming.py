"""Large buffers that a reduction reads once leave the cache first; others stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.codegen.triton.tiling import GpuLimits, candidates, choose_tile
from perfuse.codegen.triton.unit import generate_triton
from perfuse.schedule.plan import with_tile
from perfuse.schedule.tile import Tile, TileKind
from perfuse.testing import fresh_cache
from tests.unit.codegen.triton.test_tiles import CONTEXT, only_kernel, run
from tests.unit.lower.samples import f32

LARGE = torch.empty(1024, 8192)
LONG = torch.empty(512, 65_536)
WEIGHT = torch.empty(8192)
H200 = GpuLimits()


def loads(fn: Callable[..., Any], *inputs: Tensor, **changes: Any) -> list[bool]:
    """Whether each load of the kernel is marked, in order."""
    kernel, alone = only_kernel(fn, *inputs)
    tile = replace(choose_tile(kernel, H200), **changes)
    text = generate_triton(with_tile(alone, tile), CONTEXT).text
    found = re.findall(r"tl\.load\(a\d.*", text)
    return ["eviction_policy='evict_first'" in line for line in found]


@pytest.mark.parametrize(
    ("fn", "inputs", "marked"),
    [
        (lambda x: x.sum(-1), (LARGE,), [True]),
        (lambda x: x.sum(0), (LARGE,), [True]),
        (lambda x: x.abs().amax(), (LARGE,), [True]),
        (lambda x: torch.softmax(x, -1), (LARGE,), [True]),
        (lambda x: x.argmax(-1), (LARGE,), [True]),
        (lambda x, w: (x * w).sum(-1), (LARGE, WEIGHT), [True, False]),
        (lambda x, y: (x * y).sum(-1), (LARGE, torch.empty_like(LARGE)), [True, True]),
        # Not large, nothing reduced, or each element for two positions.
        (lambda x: x.sum(-1), (LARGE[:512],), [False]),
        (lambda x: x * 2, (LARGE,), [False]),
        (lambda x: (x + x.flip(-1)).sum(-1), (LARGE,), [False, False]),
        (lambda x: (x[:, None] * torch.ones(1, 2, 1)).sum(-1), (LARGE,), [False]),
    ],
    ids=(
        *("rows", "columns", "all", "softmax", "argmax", "weight", "two"),
        *("small", "map", "flipped", "repeated"),
    ),
)
def test_large_reads_that_happen_once(
    fn: Callable[..., Any], inputs: tuple[Tensor, ...], marked: list[bool]
) -> None:
    assert loads(fn, *inputs) == marked


def test_rows_swept_twice_are_kept() -> None:
    """A long row that is written too is read once for its sums, and again to be written."""
    assert not any(loads(lambda x: F.softmax(x, -1), LONG))
    assert all(loads(lambda x: x.var(-1), LONG))


def test_a_tile_may_leave_it() -> None:
    assert loads(lambda x: x.sum(-1), LARGE, streams=False) == [False]
    kernel, _ = only_kernel(lambda x: x.sum(-1), LARGE)
    tiles = candidates(kernel, H200)
    assert [t for t in tiles if not t.streams] == [replace(tiles[0], streams=False)]
    assert str(tiles[0]) + ", cached" in map(str, tiles)


def test_values_are_the_same() -> None:
    x = f32(64, 16).repeat(128, 64)
    kernel, alone = only_kernel(lambda x: x.sum(-1), x)
    with fresh_cache():
        (found,) = run(alone, Tile(TileKind.ROWS, 256, 1024, 4), [x])
    assert kernel.members
    torch.testing.assert_close(found, x.sum(-1), rtol=1e-5, atol=1e-4)
