"""Few, long rows: several blocks share each row, a launch for every stage.

A block stores the partial results of its part of a row in scratch; the next launch begins by
combining them, so that every block of a row knows the row's results.
"""

from __future__ import annotations

from dataclasses import replace

from perfuse.codegen.triton import reduce
from perfuse.codegen.triton.emit import ROWS
from perfuse.codegen.triton.frame import KernelText, TritonFrame
from perfuse.codegen.triton.pairing import sweeps
from perfuse.codegen.triton.rows import Rows, RowWriter
from perfuse.codegen.triton.tiling import num_blocks, power_of_two
from perfuse.ir import index as ix
from perfuse.schedule.plan import Member, Role


def split_texts(frame: TritonFrame) -> list[KernelText]:
    """One launch per stage, and a last one if a stage ends in a reduction."""
    count = 1 + max(m.stage for m in frame.kernel.members)
    has_open_end = any(m.role == Role.INNER and m.stage == count - 1 for m in frame.kernel.members)
    parts = (frame.kernel, frame.buffers, frame.tile, frame.names.dialect)
    numbers = range(count + int(has_open_end))
    return [_Stage(TritonFrame(*parts), number).text() for number in numbers]


class _Stage(Rows):
    """The launch of one stage: results of earlier ones, then its own share of the columns."""

    def __init__(self, frame: TritonFrame, number: int) -> None:
        super().__init__(frame)
        self.number = number

    def text(self) -> KernelText:
        frame, w = self.frame, self.frame.w
        w.line(f"block = {frame.program(0)}")
        w.line(f"part = {frame.program(1)}")
        row = self.place_rows(w)
        for number in range(self.number + 1):
            for m in frame.kernel.members:
                if m.role == Role.INNER and m.stage == number - 1:
                    self._join_parts(row, m, is_new=number == self.number)
            for m in frame.kernel.members:
                if m.role == Role.ROW and m.stage == number:
                    self._row_value(row, m, is_new=number == self.number)
        own = [m for m in frame.kernel.members if m.stage == self.number]
        swept = [m for m in own if sweeps(frame.kernel, m)]
        if swept:
            self._own_share(row, swept)
        blocks = num_blocks(frame.size(frame.rows), self.tile.rows)
        return frame.text((blocks, self.tile.splits if swept else 1, 1))

    def _first_only(self, row: RowWriter) -> RowWriter:
        """The same rows, in which only the first block of each may store."""
        name, own = self.frame.names.local(), row.masks.get(ROWS)
        self.frame.w.line(f"{name} = (row >= 0) & (part == 0){f' & {own}' if own else ''}")
        return replace(row, masks={**row.masks, ROWS: name})

    def _row_value(self, row: RowWriter, m: Member, *, is_new: bool) -> None:
        self.row_value(row, m, stored=False)
        if m.loop.out in self.frame.kernel.stored and is_new:
            value = row.results[m.loop.out]
            emitter = self._row_emitter(self._first_only(row), m)
            wide = replace(value, lanes=value.lanes | ROWS)
            emitter.store(m.loop.out, m.loop.index, wide, m.loop.value)

    def _places(self, m: Member) -> tuple[str, ...]:
        height = self.frame.size(self.frame.rows)
        return self.frame.scratch_of(m, ix.mul(height, self.tile.splits))

    def _join_parts(self, row: RowWriter, m: Member, *, is_new: bool) -> None:
        """The result of an earlier stage, from the partial results of a row's blocks."""
        frame, w, splits = self.frame, self.frame.w, self.tile.splits
        at, known = frame.names.local(), frame.names.local()
        w.line(f"{at} = tl.arange(0, {power_of_two(splits)})[None, :]")
        inside = row.masks.get(ROWS)
        w.line(f"{known} = ({at} < {splits}) & ({inside or 'row >= 0'})")
        parts: list[str] = []
        for place, start in zip(self._places(m), reduce.starts(m), strict=True):
            name = frame.names.local()
            load = f"tl.load({place} + row * {splits} + {at}, {known}, other=0)"
            text = load if parts else reduce.read_back(m, load)
            w.line(f"{name} = tl.where({known}, {text}, {start})")
            parts.append(name)
        emitter = self._row_emitter(row, m)
        value = frame.finished(emitter, m, reduce.joined(m, parts, 1), ROWS)
        row.results[m.loop.out] = value
        if is_new and m.loop.out in frame.kernel.stored:
            first = self._row_emitter(self._first_only(row), m)
            first.store(m.loop.out, m.loop.index, value)

    def _own_share(self, row: RowWriter, members: list[Member]) -> None:
        width, columns, splits = self.width, self.tile.columns, self.tile.splits
        assert isinstance(width, int), "rows are shared out only when their length is known"
        share = -(-width // (columns * splits)) * columns
        self.frame.w.line(f"share = part * {share}")
        last = f"tl.minimum(share + {share}, {width})"
        self.sweep(self.frame.w, row, members, "share", last)

    def join(self, row: RowWriter, m: Member) -> None:
        """Store the partial results of this block for the next launch."""
        frame, w = self.frame, self.frame.w
        names = [frame.names.local() for _ in frame.parts(m)]
        w.line(f"{', '.join(names)} = {reduce.joined(m, frame.parts(m), 1)}")
        inside = row.masks.get(ROWS)
        mask = f", {inside}" if inside else ""
        for i, (place, name) in enumerate(zip(self._places(m), names, strict=True)):
            text = reduce.kept(m, name) if i == 0 else name
            w.line(f"tl.store({place} + row * {self.tile.splits} + part, {text}{mask})")
