"""Reductions across blocks: each keeps its own accumulator; at the end they are combined.

Whole-tensor results are joined by the block that finishes last, always in the same order; so are
those of columns that a few blocks share. Columns that all blocks share are joined by a launch of
their own.
"""

from __future__ import annotations

from perfuse.codegen.triton import reduce
from perfuse.codegen.triton.emit import COLUMNS, Block, Dialect, Scope
from perfuse.codegen.triton.frame import KernelText, TritonFrame
from perfuse.codegen.triton.tiling import num_blocks, power_of_two
from perfuse.codegen.writer import Writer
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.schedule.plan import Kernel, Member, Role
from perfuse.schedule.tile import Tile, TileKind
from perfuse.schedule.turns import Scratch

_MOST_JOINED = 2048  # partial results of blocks are read in steps of this many


class Carry:
    """The accumulators of a kernel that outlive a block of rows."""

    def __init__(self, frame: TritonFrame, shape: str, num_sharing: int) -> None:
        self.frame = frame
        self.shape = shape
        self.num_sharing = num_sharing  # blocks that have a part of the same columns
        self.all = frame.of_role(Role.ALL)
        self.outer = frame.of_role(Role.OUTER)

    def declare(self, w: Writer, *, is_swept: bool = False) -> None:
        """The accumulators; those of columns of rows that are swept stay in memory."""
        for m in self.all if is_swept else [*self.all, *self.outer]:
            self.frame.declare(w, m, self.shape)

    # -- whole-tensor results --------------------------------------------------------------

    def finish_all(self, w: Writer, number: str, programs: Dim, axes: list[int]) -> None:
        """Join the lanes, then the blocks: `number` is this one's, of `programs`."""
        if not self.all:
            return
        frame = self.frame
        scope = Scope(w, frozenset(), None)
        totals = []
        for m in self.all:
            text = frame.parts(m)[0]
            for axis in axes:
                text = reduce.joined(m, [text], axis, keep=False)
            totals.append(frame.names.local())
            w.line(f"{totals[-1]} = {text}")
        places = [frame.scratch_of(m, programs)[0] for m in self.all]
        for m, place, total in zip(self.all, places, totals, strict=True):
            w.line(f"tl.store({place} + {number}, {reduce.kept(m, total)})")
        done = Scratch(f"{frame.kernel.name}_done", DType.I32, 1, fill=0, is_kept=True)
        counter = frame.need(done)
        with w.indented(f"if pf_last_block({counter}, {frame.dim(programs)}):"):
            for m, place in zip(self.all, places, strict=True):
                self._join_blocks(w, m, place, programs, scope)
            w.line(f"tl.store({counter}, 0)")

    def _join_blocks(self, w: Writer, m: Member, place: str, programs: Dim, scope: Scope) -> None:
        frame = self.frame
        emitter = frame.emitter(scope, Block({}, {}, {}), m, {})
        count = frame.dim(programs)
        block = min(_MOST_JOINED, power_of_two(programs) if isinstance(programs, int) else 1024)
        joined, part, at, step = (frame.names.local() for _ in range(4))
        w.line(reduce.declarations(m, [joined], f"[{block}]")[0])
        with w.indented(f"for {step} in range(0, {count}, {block}):"):
            w.line(f"{at} = {step} + tl.arange(0, {block})")
            load = f"tl.load({place} + {at}, {at} < {count}, other=0, volatile=True)"
            (start,) = reduce.starts(m)
            w.line(f"{part} = tl.where({at} < {count}, {reduce.read_back(m, load)}, {start})")
            w.line(f"{joined} = {reduce.combined(m, [joined], [part])}")
        value = frame.finished(emitter, m, reduce.joined(m, [joined], 0, keep=False), 0)
        emitter.store(m.loop.out, m.loop.index, value)

    # -- results for each column -----------------------------------------------------------

    def finish_columns(self, w: Writer, block: Block, number: str, column: str, width: Dim) -> None:
        """Join the rows of this block, and store the sums, or leave them for `join_columns`."""
        frame = self.frame
        scope = Scope(w, frame.atoms(frame.columns), None)
        mask = block.mask(COLUMNS)
        inside = "" if mask is None else f", {mask}"
        for m in self.outer:
            emitter = frame.emitter(scope, block, m, {})
            text = reduce.joined(m, frame.parts(m), 0)
            if self.num_sharing == 1:
                emitter.store(m.loop.out, m.loop.index, frame.finished(emitter, m, text, COLUMNS))
                continue
            (place,) = frame.scratch_of(m, ix.mul(width, self.num_sharing))
            at = f"{number} * ({frame.dim(width)}) + {column}"
            w.line(f"tl.store({place} + {at}, {reduce.kept(m, text)}{inside})")

    def join_here(self, w: Writer, block: Block, width: Dim) -> None:
        """The block that finishes its columns last joins what all of them left."""
        frame, sharing = self.frame, self.num_sharing
        across = num_blocks(width, frame.tile.columns)
        name = f"{frame.kernel.name}_columns_done"
        counters = frame.need(Scratch(name, DType.I32, across, fill=0, is_kept=True))
        scope = Scope(w, frame.atoms(frame.columns), None)
        with w.indented(f"if pf_last_block({counters} + tl.program_id(0), {sharing}):"):
            for m in self.outer:
                emitter = frame.emitter(scope, block, m, {})
                text = self._joined_blocks(w, block, m, width)
                emitter.store(m.loop.out, m.loop.index, frame.finished(emitter, m, text, COLUMNS))
            w.line(f"tl.store({counters} + tl.program_id(0), 0)")

    def _joined_blocks(self, w: Writer, block: Block, m: Member, width: Dim) -> str:
        """The accumulators of these columns in all blocks, combined."""
        frame, sharing = self.frame, self.num_sharing
        rows = min(power_of_two(sharing), max(1, _MOST_JOINED // frame.tile.columns))
        (place,), (start,) = frame.scratch_of(m, ix.mul(width, sharing)), reduce.starts(m)
        joined, part, at, step = (frame.names.local() for _ in range(4))
        w.line(reduce.declarations(m, [joined], f"[{rows}, C]")[0])
        with w.indented(f"for {step} in range(0, {sharing}, {rows}):"):
            w.line(f"{at} = {step} + tl.arange(0, {rows})[:, None]")
            mask = block.mask(COLUMNS)
            known = f"({at} < {sharing})" + ("" if mask is None else f" & {mask}")
            where = f"{place} + {at} * ({frame.dim(width)}) + column"
            load = reduce.read_back(m, f"tl.load({where}, {known}, other=0, volatile=True)")
            w.line(f"{part} = tl.where({known}, {load}, {start})")
            w.line(f"{joined} = {reduce.combined(m, [joined], [part])}")
        return reduce.joined(m, [joined], 0)


def joins_itself(tile: Tile, width: Dim) -> bool:
    """Whether the blocks that share columns join their sums without another launch."""
    return tile.kind is TileKind.COLUMNS and tile.splits > 1 and isinstance(width, int)


def join_columns(
    kernel: Kernel, first: TritonFrame, num_sharing: int, dialect: Dialect
) -> KernelText:
    """The launch that combines the partial results of each column."""
    members = [m for m in kernel.members if m.role == Role.OUTER]
    width = first.size(first.columns)
    # Few columns per block: there are not many, and each is long.
    columns = 16 if not isinstance(width, int) else min(16, power_of_two(width))
    rows = min(128, power_of_two(num_sharing))
    tile = Tile(TileKind.JOIN, rows, columns, 4)
    frame = TritonFrame(kernel, first.buffers, tile, dialect)
    w = frame.w
    masks: dict[int, str] = {}
    w.line(f"column = {frame.program(0)} * C + tl.arange(0, C)[None, :]")
    frame.mask_end(w, masks, "in_columns", "column", width, columns)
    frame.place_axes(w, frame.columns, "column")
    carry = Carry(frame, "[R, C]", 1)
    for m in members:
        frame.declare(w, m, "[R, C]")
    places = [frame.scratch_of(m, ix.mul(width, num_sharing))[0] for m in members]
    with w.indented(f"for first in range(0, {num_sharing}, R):"):
        w.line("block = first + tl.arange(0, R)[:, None]")
        w.line(f"known = (block < {num_sharing}){' & in_columns' if masks else ''}")
        for m, place in zip(members, places, strict=True):
            part, (start,) = frame.names.local(), reduce.starts(m)
            at = f"{place} + block * ({frame.dim(width)}) + column"
            load = reduce.read_back(m, f"tl.load({at}, known, other=0)")
            w.line(f"{part} = tl.where(known, {load}, {start})")
            accumulator = frame.parts(m)
            w.line(f"{accumulator[0]} = {reduce.combined(m, accumulator, [part])}")
    carry.finish_columns(w, frame.block(masks), "0", "column", width)
    return frame.text((num_blocks(width, columns), 1, 1))
