"""Kernels of attention: a writer for each part, and the tile that it is cut into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from perfuse.codegen.triton.emit import Dialect
from perfuse.codegen.triton.frame import KernelText
from perfuse.codegen.triton.templates.attention_forward import forward_text
from perfuse.codegen.triton.templates.attention_frame import SMALLEST, AttentionFrame, padded
from perfuse.codegen.triton.templates.attention_gradient import (
    key_gradient_text,
    query_gradient_text,
)
from perfuse.codegen.triton.tiling import GpuLimits
from perfuse.ir.attention import Attention, AttentionPart
from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer
from perfuse.schedule.plan import Kernel
from perfuse.schedule.size_hints import Hints, value_of
from perfuse.schedule.tile import Tile, TileKind

TEXTS: dict[AttentionPart, Callable[[AttentionFrame], KernelText]] = {
    AttentionPart.FORWARD: forward_text,
    AttentionPart.QUERY_GRADIENT: query_gradient_text,
    AttentionPart.KEY_GRADIENT: key_gradient_text,
}


def attention_texts(
    kernel: Kernel, buffers: Mapping[str, Buffer], tile: Tile, dialect: Dialect
) -> list[KernelText]:
    """The function that computes one part of attention."""
    assert kernel.attention is not None
    write = TEXTS[kernel.attention.part]
    text = write(AttentionFrame(kernel, buffers, tile, dialect))
    if text.checks_indices and not dialect.pipelines_assertions and tile.num_stages > 1:
        return attention_texts(kernel, buffers, replace(tile, num_stages=1), dialect)
    return [text]


_MOST_SPLITS = 64

# Of halves by the size of a head: rows, columns, warps, stages. Those of 128 are the fastest of
# benchmarks/results/2026-11-16-h200-flex; the others were not measured.
HALVES = {
    AttentionPart.FORWARD: {64: (128, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 32, 4, 2)},
    AttentionPart.QUERY_GRADIENT: {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (32, 32, 4, 2)},
    AttentionPart.KEY_GRADIENT: {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (32, 32, 4, 2)},
}
FLOATS = {64: (64, 32, 4, 2), 128: (32, 32, 4, 2), 256: (16, 16, 4, 1)}


def attention_tile(
    node: Attention, buffers: Mapping[str, Buffer], hints: Hints, limits: GpuLimits
) -> Tile:
    """How a kernel of attention is cut: by its dtype, the size of a head, and the block mask."""
    head = max(64, padded(node.query.shape[3]), padded(node.value.shape[3]))
    is_half = buffers[node.query.buffer].dtype is not DType.F32
    rows, columns, num_warps, num_stages = (HALVES[node.part] if is_half else FLOATS)[head]
    _, _, queries, keys = node.sizes
    down, across = queries, keys
    if node.part is AttentionPart.KEY_GRADIENT:
        down, across = keys, queries
    blocks = node.blocks
    rows, columns = _fitted(rows, down, blocks.rows), _fitted(columns, across, blocks.others)
    splits = 1
    if node.part is AttentionPart.FORWARD:
        splits = _splits(node, rows, columns, hints, limits)
    return Tile(TileKind.ATTENTION, rows, columns, num_warps, num_stages, splits=splits)


def _splits(node: Attention, rows: int, columns: int, hints: Hints, limits: GpuLimits) -> int:
    """Programs that share the keys of a block of queries: some where there are few blocks."""
    batch, heads, queries, keys = (value_of(size, hints) for size in node.sizes)
    programs = batch * heads * -(-queries // rows)
    steps = -(-keys // columns)
    if 2 * programs > limits.num_processors:
        return 1
    return max(1, min(_MOST_SPLITS, steps // 2, 2 * limits.num_processors // programs))


def _fitted(step: int, size: Dim, block: int | None) -> int:
    """A step that is not far above a size, and divides the blocks of a mask with several."""
    if isinstance(size, int):
        step = min(step, padded(size))
    return step if block is None else min(step, block & -block)


def smaller_attention(tile: Tile) -> Tile | None:
    """A tile that needs less of a processor; None if there is none."""
    if tile.num_stages > 1:
        return replace(tile, num_stages=tile.num_stages - 1)
    if tile.columns > SMALLEST:
        return replace(tile, columns=tile.columns // 2)
    return replace(tile, rows=tile.rows // 2) if tile.rows > SMALLEST else None
