"""More ways to cut a kernel than tuning tries: what might become the model's choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from perfuse.codegen.triton.tiling import (
    GpuLimits,
    columns_of,
    fitted,
    power_of_two,
    rows_of,
)
from perfuse.schedule.plan import Kernel, static_product
from perfuse.schedule.tile import Tile, TileKind


def wider(kernel: Kernel, best: Tile, limits: GpuLimits, widest: int) -> list[Tile]:
    """Candidates of a kernel that reduces: pipelined or not, much or little on its way."""
    height = static_product([a.size for a in rows_of(kernel)])
    width = static_product([a.size for a in columns_of(kernel)])
    if best.kind is TileKind.FLAT and best.programs is not None:
        found = list(_flat(best, limits))
    elif best.kind is TileKind.COLUMNS and height is not None and width is not None:
        found = [*_columns(height, width, limits), *_columns_as_rows(height, width, limits)]
    elif best.kind is TileKind.ROWS and best.programs is not None and not best.is_swept:
        found = list(_carrying(best, limits))
    elif best.kind is TileKind.ROWS and best.is_swept:
        found = list(_swept(best))
    elif best.kind is TileKind.ROWS:
        found = [*_held(best), *_swept(best), *_round(best, limits)]
    else:
        found = []
    return [fitted(tile, kernel, limits, widest) for tile in found]


def _held(best: Tile) -> Iterator[Tile]:
    for rows, warps in ((1, 2), (1, 8), (1, 16), (1, 32), (2, 8), (2, 16)):
        yield replace(best, rows=rows, num_warps=warps)
    yield replace(best, num_warps=16, streams=False)


def _swept(best: Tile) -> Iterator[Tile]:
    """Little at a time, so that what streams through the cache takes little of it."""
    cut = replace(best, rows=1, is_swept=True, programs=None, num_stages=1)
    sizes = (
        (512, 4),
        (1024, 4),
        (1024, 8),
        (2048, 4),
        (2048, 8),
        (2048, 16),
        (4096, 8),
        (4096, 16),
    )
    for columns, warps in sizes:
        if columns < best.columns or best.is_swept:
            yield replace(cut, columns=columns, num_warps=warps)
    yield replace(cut, rows=2, columns=1024, num_warps=8)
    yield replace(cut, columns=2048, num_warps=8, num_stages=3)
    yield replace(cut, columns=2048, num_warps=16, streams=False)


def _round(best: Tile, limits: GpuLimits) -> Iterator[Tile]:
    for warps, stages, per_processor in ((4, 3, 4), (8, 2, 4), (8, 3, 2), (16, 3, 2)):
        programs = limits.num_processors * per_processor
        yield replace(best, num_warps=warps, num_stages=stages, programs=programs)


def _flat(best: Tile, limits: GpuLimits) -> Iterator[Tile]:
    cuts = (
        (2048, 8, 1, 8), (2048, 16, 1, 4), (4096, 4, 1, 8), (4096, 16, 1, 4), (8192, 8, 1, 8),
        (8192, 16, 1, 4), (16384, 8, 1, 8), (16384, 16, 1, 4), (2048, 8, 4, 8), (2048, 4, 4, 8),
        (4096, 8, 4, 4), (4096, 8, 3, 2), (1024, 4, 4, 8),
    )  # fmt: skip
    for columns, warps, stages, per_processor in cuts:
        programs = limits.num_processors * per_processor
        yield replace(best, columns=columns, num_warps=warps, num_stages=stages, programs=programs)
    many = power_of_two(limits.num_processors * 16)
    yield replace(best, columns=4096, num_warps=8, num_stages=1, programs=many)


def _columns(height: int, width: int, limits: GpuLimits) -> Iterator[Tile]:
    """The last rows are for kernels that compute much: few elements a thread, many threads."""
    shapes = (
        (32, 128, 4, 4, 2), (32, 128, 4, 5, 2), (64, 64, 4, 4, 2), (32, 64, 4, 4, 4),
        (32, 128, 8, 5, 2), (16, 256, 8, 1, 8), (64, 128, 8, 1, 4), (64, 128, 16, 1, 2),
        (128, 64, 8, 1, 4), (128, 64, 16, 1, 2), (64, 64, 4, 1, 8), (32, 64, 4, 1, 8),
        (16, 128, 4, 4, 2), (64, 64, 8, 4, 2), (64, 64, 8, 1, 4),
        (16, 128, 8, 2, 4), (16, 128, 8, 3, 3), (8, 128, 4, 1, 12), (8, 128, 4, 3, 6),
        (8, 256, 8, 3, 3), (16, 64, 4, 3, 6), (32, 64, 8, 3, 3), (32, 128, 16, 2, 2),
        (32, 128, 16, 3, 2), (32, 128, 16, 3, 1), (16, 128, 16, 3, 2), (8, 128, 8, 3, 4),
    )  # fmt: skip
    for rows, columns, warps, stages, per_processor in shapes:
        across = -(-width // columns)
        splits = max(1, min(limits.num_processors * per_processor // across, height // rows))
        yield Tile(TileKind.COLUMNS, rows, columns, warps, stages, splits=splits)
        if stages == 4:
            yield Tile(TileKind.COLUMNS, rows, columns, warps, stages, splits=splits, streams=False)


def _columns_as_rows(height: int, width: int, limits: GpuLimits) -> Iterator[Tile]:
    """Whole rows by persistent blocks, each with the sums of all columns."""
    if width > 4096:
        return
    block = power_of_two(width)
    for rows, warps, stages, per_processor in (
        (1, 8, 1, 4),
        (1, 8, 3, 2),
        (1, 16, 1, 2),
        (2, 16, 3, 1),
    ):
        programs = min(limits.num_processors * per_processor, -(-height // rows))
        yield Tile(TileKind.ROWS, rows, block, warps, stages, programs=programs)


def _carrying(best: Tile, limits: GpuLimits) -> Iterator[Tile]:
    shapes = (
        (1, 2, 3, 8), (1, 2, 4, 8), (1, 4, 1, 8), (2, 4, 1, 8), (2, 8, 1, 4), (4, 8, 1, 2),
        (4, 4, 3, 3), (4, 8, 3, 2), (4, 4, 4, 2), (8, 8, 3, 1), (2, 2, 3, 6), (1, 1, 3, 8),
    )  # fmt: skip
    for rows, warps, stages, per_processor in shapes:
        programs = limits.num_processors * per_processor
        yield replace(best, rows=rows, num_warps=warps, num_stages=stages, programs=programs)
    yield replace(best, streams=False)
