"""Kernels over rows, stage by stage: a row held in registers, or swept in steps when it is long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from perfuse.codegen.emitter import Value
from perfuse.codegen.triton import online, reduce
from perfuse.codegen.triton.carry import Carry
from perfuse.codegen.triton.emit import COLUMNS, ROWS, Block, Emitter, Scope
from perfuse.codegen.triton.frame import KernelText, TritonFrame
from perfuse.codegen.triton.pairing import sweeps
from perfuse.codegen.triton.tiling import num_blocks
from perfuse.codegen.writer import Writer
from perfuse.ir import index as ix
from perfuse.schedule.plan import Member, Role


@dataclass(slots=True)
class RowWriter:
    """A block of rows being written: where, its masks, and the results known so far."""

    scope: Scope
    masks: dict[int, str]
    results: dict[str, Value] = field(default_factory=dict)


def rows_text(frame: TritonFrame) -> KernelText:
    """Blocks of whole rows; with results across rows, persistent blocks with accumulators."""
    w, tile = frame.w, frame.tile
    blocks = num_blocks(frame.size(frame.rows), tile.rows)
    writer = Rows(frame)
    if tile.programs is None:
        w.line(f"block = {frame.program(0)}")
        writer.block_of_rows(w)
        return frame.text((blocks, 1, 1))
    writer.carry.declare(w, is_swept=tile.is_swept)
    around = writer.around(w)
    first, loop = frame.program(0), w.child()
    with loop.indented(
        f"for block in tl.range({first}, {frame.dim(blocks)}, {tile.programs}, "
        f"num_stages={1 if tile.is_swept else tile.num_stages}):"
    ):
        writer.block_of_rows(loop, around)
    w.take(loop)
    writer.finish(w)
    return frame.text((tile.programs, 1, 1))


class Rows:
    """The text of a kernel's rows."""

    def __init__(self, frame: TritonFrame) -> None:
        self.frame = frame
        self.tile = frame.tile
        self.carry = Carry(frame, "[R, C]", frame.tile.programs or 1)
        self.width = frame.size(frame.columns)
        self.num_stages = 1 + max((m.stage for m in frame.kernel.members), default=0)
        self.pairs = [online.find_pair(frame.kernel, n) for n in range(self.num_stages)]

    # -- rows ------------------------------------------------------------------------------

    def around(self, w: Writer) -> RowWriter:
        """Emit what all rows of one program share: columns that it holds, scalars."""
        masks: dict[int, str] = {}
        if self.tile.is_swept:
            return RowWriter(Scope(w, frozenset(), None), masks)
        self.place_columns(w, "0", masks)
        return RowWriter(Scope(w, self.frame.atoms(self.frame.columns), None), masks)

    def block_of_rows(self, w: Writer, around: RowWriter | None = None) -> None:
        row = self.place_rows(w, around)
        if not self.tile.is_swept and around is None:
            self.place_columns(w, "0", row.masks)
        for number in range(self.num_stages):
            self.stage(w, row, number)

    def place_rows(self, w: Writer, around: RowWriter | None = None) -> RowWriter:
        """The variables of a block's rows."""
        frame, masks = self.frame, {} if around is None else dict(around.masks)
        height = frame.size(frame.rows)
        w.line("row = block * R + tl.arange(0, R)[:, None]")
        if self.tile.rows > 1:
            frame.mask_end(w, masks, "in_rows", "row", height, self.tile.rows)
        frame.place_axes(w, frame.rows, "row")
        known = frame.atoms(frame.rows)
        if not self.tile.is_swept:
            known |= frame.atoms(frame.columns)
        return RowWriter(Scope(w, known, None if around is None else around.scope), masks)

    def place_columns(
        self, w: Writer, start: str, masks: dict[int, str], *, is_whole: bool = False
    ) -> None:
        """The variables of a block's columns, and their mask if some are out of bounds."""
        frame, width = self.frame, self.width
        base = "" if start == "0" else f"{start} + "
        w.line(f"column = {base}tl.arange(0, C)[None, :]")
        if not is_whole:
            frame.mask_end(w, masks, "in_columns", "column", width, self.tile.columns)
        frame.place_axes(w, frame.columns, "column")

    # -- stages ----------------------------------------------------------------------------

    def stage(self, w: Writer, row: RowWriter, number: int) -> None:
        members = [m for m in self.frame.kernel.members if m.stage == number]
        for m in members:
            if m.role == Role.ROW:
                self.row_value(row, m, stored=True)
        swept = [m for m in members if sweeps(self.frame.kernel, m)]
        if not swept:
            return
        if self.tile.is_swept:
            pair = self.pairs[number]
            if pair is not None:
                self._sweep_online(w, row, pair)
            elif not (number and self.pairs[number - 1]):
                self.sweep(w, row, swept, "0", self.frame.dim(self.width))
        else:
            block = self.frame.block(row.masks)
            for m in swept:
                self._held(row, block, m)

    def row_value(self, row: RowWriter, m: Member, *, stored: bool) -> None:
        frame = self.frame
        emitter = self._row_emitter(row, m)
        value = frame.value_of(emitter, m)
        row.results[m.loop.out] = value
        if stored and m.loop.out in frame.kernel.stored:
            frame.store(emitter, m, value, ROWS)

    def _row_emitter(self, row: RowWriter, m: Member) -> Emitter:
        return self.frame.emitter(row.scope, self.frame.block(row.masks), m, row.results)

    def store_result(self, row: RowWriter, m: Member, value: Value) -> None:
        row.results[m.loop.out] = value
        if m.loop.out in self.frame.kernel.stored:
            self._row_emitter(row, m).store(m.loop.out, m.loop.index, value)

    def _held(self, row: RowWriter, block: Block, m: Member) -> None:
        """A member over rows that are held whole."""
        frame = self.frame
        emitter = frame.emitter(row.scope, block, m, row.results)
        if m.role == Role.FULL:
            row.results[m.loop.out] = frame.stored(emitter, m, ROWS | COLUMNS)
        elif m.role == Role.INNER:
            lanes = frame.lanes_text(emitter, m, block.mask(COLUMNS), "[R, C]", "column")
            self.store_result(row, m, frame.finished(emitter, m, reduce.joined(m, lanes, 1), ROWS))
        else:
            mask = block.mask(ROWS if m.role == Role.OUTER else ROWS | COLUMNS)
            frame.step(emitter, m, frame.lanes_text(emitter, m, mask, "[R, C]", ""))

    # -- sweeps ----------------------------------------------------------------------------

    def sweep(
        self, w: Writer, row: RowWriter, members: list[Member], first: str, last: str
    ) -> None:
        """One pass over the columns in steps of a block, then the lanes joined."""
        frame = self.frame
        folding = [m for m in members if m.role == Role.INNER]
        for m in folding:
            frame.declare(w, m, "[R, C]")

        def step(scope: Scope, block: Block) -> None:
            made = dict(row.results)  # values of this step of the sweep do not outlive it
            for m in members:
                emitter = frame.emitter(scope, block, m, made)
                if m.role == Role.FULL:
                    made[m.loop.out] = frame.stored(emitter, m, ROWS | COLUMNS)
                else:
                    self._swept(emitter, block, m)

        self._over_columns(w, row, first, last, step)
        for m in folding:
            self.join(row, m)

    def _sweep_online(self, w: Writer, row: RowWriter, pair: online.Pair) -> None:
        """Two stages in one pass: their results are both known after it."""
        frame = self.frame
        pair.declare(frame, w)

        def step(scope: Scope, block: Block) -> None:
            pair.step(frame, frame.emitter(scope, block, pair.first, row.results), block)

        self._over_columns(w, row, "0", frame.dim(self.width), step)
        self._finish_one(row, pair.first, pair.first_text(frame))
        first = row.results[pair.first.loop.out].text
        self._finish_one(row, pair.second, pair.second_text(frame, first))

    def _over_columns(
        self, w: Writer, row: RowWriter, first: str, last: str, step: Callable[[Scope, Block], None]
    ) -> None:
        """A step for each block of columns: whole ones need no mask, and then what is left."""
        whole = self._num_whole() if first == "0" else None
        end, stages = last if whole is None else str(whole), self.tile.num_stages
        loop = w.child()
        with loop.indented(f"for start in tl.range({first}, {end}, C, num_stages={stages}):"):
            self._step(loop, row, step, is_whole=whole is not None)
        w.take(loop)
        if whole is not None:
            rest = w.child()
            self._step(rest, row, step, is_whole=False, start=str(whole))
            w.take(rest)

    def _num_whole(self) -> int | None:
        """The columns in whole blocks, where there are some and a part of one is left over."""
        width, columns = self.width, self.tile.columns
        if not isinstance(width, int) or width < columns or width % columns == 0:
            return None
        return width // columns * columns

    def _step(
        self, w: Writer, row: RowWriter, step: Callable[[Scope, Block], None], *, is_whole: bool,
        start: str = "start",
    ) -> None:  # fmt: skip
        frame, masks = self.frame, dict(row.masks)
        self.place_columns(w, start, masks, is_whole=is_whole)
        step(Scope(w, frame.atoms(frame.columns), row.scope), frame.block(masks))

    def _finish_one(self, row: RowWriter, m: Member, text: str) -> None:
        value = self.frame.finished(self._row_emitter(row, m), m, text, ROWS)
        self.store_result(row, m, value)

    def join(self, row: RowWriter, m: Member) -> None:
        self._finish_one(row, m, reduce.joined(m, self.frame.parts(m), 1))

    def _swept(self, emitter: Emitter, block: Block, m: Member) -> None:
        frame = self.frame
        needed = {Role.INNER: COLUMNS, Role.OUTER: ROWS, Role.ALL: ROWS | COLUMNS}[m.role]
        lanes = frame.lanes_text(emitter, m, block.mask(needed), "[R, C]", "column")
        if m.role == Role.OUTER:
            self._add_to_memory(emitter, block, m, lanes)
        else:
            frame.step(emitter, m, lanes)

    def _add_to_memory(
        self, emitter: Emitter, block: Block, m: Member, lanes: tuple[str, ...]
    ) -> None:
        """Columns of rows too long to hold: this program's own sums, kept in memory."""
        frame = self.frame
        (sums,) = frame.scratch_of(m, ix.mul(self.width, self.tile.programs or 1), is_filled=True)
        place = f"{sums} + tl.program_id(0) * ({frame.dim(self.width)}) + column"
        mask = block.mask(COLUMNS)
        inside = "" if mask is None else f", {mask}"
        here, old = frame.names.local(), frame.names.local()
        emitter.line(f"{here} = {reduce.joined(m, lanes, 0)}")
        emitter.line(f"{old} = {reduce.read_back(m, f'tl.load({place}{inside})')}")
        kept = reduce.kept(m, reduce.combined(m, [old], [here]))
        emitter.line(f"tl.store({place}, {kept}{inside})")

    # -- the end ---------------------------------------------------------------------------

    def finish(self, w: Writer) -> None:
        """Emit the results carried across the rows of this program."""
        masks: dict[int, str] = {}
        if self.carry.outer and not self.tile.is_swept:
            self.place_columns(w, "0", masks)
            block = self.frame.block(masks)
            self.carry.finish_columns(w, block, "tl.program_id(0)", "column", self.width)
        self.carry.finish_all(w, "tl.program_id(0)", self.tile.programs or 1, [1, 0])
