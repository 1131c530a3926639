"""Cache policy: reads that a kernel needs once and that should not occupy the cache.

A tensor as large as the cache, read from end to end, would evict what others left there, much of
it still to be written to memory. Marked evict-first, its own lines replace one another.
"""

from __future__ import annotations

from collections.abc import Mapping

from perfuse.codegen.triton.pairing import is_one_sweep, sweeping_stages
from perfuse.codegen.triton.tiling import may_stream
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer
from perfuse.schedule.plan import Kernel, static_product
from perfuse.schedule.tile import Tile, TileKind

Place = tuple[str, Dim]  # a buffer, and where in it


def streamed_places(kernel: Kernel, buffers: Mapping[str, Buffer], tile: Tile) -> frozenset[Place]:
    """The reads of a kernel that reduces something which are large and happen just once."""
    count = static_product([a.size for a in kernel.axes])
    if count is None or not tile.streams or not _is_swept_once(kernel, tile):
        return frozenset()
    whole = _whole_reads(kernel)
    return frozenset(
        (name, places[0])
        for name, places in whole.items()
        if len(places) == 1
        and _is_each_once(buffers[name], count)
        and may_stream(kernel, buffers[name].dtype.num_bytes)
    )


def _whole_reads(kernel: Kernel) -> dict[str, list[Dim]]:
    """Indices of the reads that vary along every axis: reads shared between steps are left out."""
    axes = {a.atom for a in kernel.axes if a.atom is not None}
    made = {m.loop.out for m in kernel.members}
    found: dict[str, list[Dim]] = {}
    for read in dict.fromkeys(r for m in kernel.members for r in m.loop.reads()):
        name, index = read.attr
        if name not in made and axes <= read.variables():
            places = found.setdefault(name, [])
            if index not in places:
                places.append(index)
    return found


def _is_each_once(buffer: Buffer, count: int) -> bool:
    """There is an element for every position."""
    held = static_product((buffer.num_elements,))
    return held is not None and held >= count


def _is_swept_once(kernel: Kernel, tile: Tile) -> bool:
    """Rows that are not held are read again for every stage that sweeps over them."""
    if not (tile.is_swept or tile.kind is TileKind.SPLIT):
        return True
    if len(sweeping_stages(kernel)) <= 1:
        return True
    return tile.kind is TileKind.ROWS and is_one_sweep(kernel)
