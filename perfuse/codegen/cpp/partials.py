"""Reductions over rows: each thread keeps its own sums, combined in thread order.

Column sums are kept twice: recent ones are regularly flushed into the totals.
What a flush rounds off is kept too (float32): the error is that of the few rows in between, however
many there are. Sums of everything keep what the addition of each row rounds off.
"""

from __future__ import annotations

from perfuse.codegen.cpp.emit import Emitter
from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.cpp.spelling import COMBINE, COMPUTE_TYPE, identity
from perfuse.codegen.writer import Writer
from perfuse.ir.dtype import DType
from perfuse.ir.program import LoopKind
from perfuse.schedule.plan import Member, Role

# Rows between two flushes of column sums.
_FLUSH_ROWS = 32
_MOST_THREADS = 1024


class Partials:
    """The text for a kernel's "outer" (one value per column) and "all" (one value) members."""

    def __init__(self, frame: CppFrame) -> None:
        self.frame = frame
        self.outer = frame.of_role(Role.OUTER)
        self.all = frame.of_role(Role.ALL)

    def declare(self, w: Writer) -> None:
        """Memory shared by all threads."""
        if self.outer:
            lanes, columns = self.frame.lanes, self.frame.count(self.frame.shape.columns)
            w.line(f"const int64_t width = ({columns} + {lanes - 1}) / {lanes} * {lanes};")
            total = f"threads * width * 16 * {len(self.outer)}"
            w.line(f"char* const totals = pf::scratch(1, {total});")
        for m in self.all:
            cpp = COMPUTE_TYPE[m.loop.value.dtype]
            name = self.frame.short(m)
            w.line(f"{cpp} parts_{name}[{_MOST_THREADS}];")
            w.line(f"{cpp}* const part_{name} = parts_{name};")
        if self.all:
            w.line(f"if (threads > {_MOST_THREADS}) threads = {_MOST_THREADS};")

    def start(self, w: Writer) -> None:
        """A thread's own accumulators, initialised to their identities."""
        for m in self.all:
            total = "pf::Total" if self._keeps_lost(m) else self.frame.accumulator(m)
            w.line(f"{total} all_{self.frame.short(m)};")
        for m in self.outer:
            cpp, name = COMPUTE_TYPE[m.loop.value.dtype], self.frame.short(m)
            w.line(f"{cpp}* const sum_{name} = {self._sums(m, 'thread')};")
            w.line(f"{cpp}* const new_{name} = sum_{name} + width;")
            first, rows = identity(m.loop.kind, m.loop.value.dtype), 2
            if self._keeps_lost(m):
                w.line(f"{cpp}* const lost_{name} = sum_{name} + 2 * width;")
                rows = 3
            w.line(f"for (int64_t i = 0; i < {rows} * width; ++i) sum_{name}[i] = {first};")

    def _keeps_lost(self, m: Member) -> bool:
        return m.loop.kind is LoopKind.SUM and m.loop.value.dtype is DType.F32

    def _sums(self, m: Member, thread: str) -> str:
        cpp, place = COMPUTE_TYPE[m.loop.value.dtype], self.outer.index(m)
        return f"({cpp}*)(totals + ({thread} * {len(self.outer)} + {place}) * width * 16)"

    def step(self, emitter: Emitter, m: Member) -> None:
        """One vector of columns of one row."""
        value, cpp = emitter.value(m.loop.value), COMPUTE_TYPE[m.loop.value.dtype]
        place = f"new_{self.frame.short(m)} + {self.frame.flat_column()}"
        emitter.update(place, cpp, COMBINE[m.loop.kind], value)

    def after_row(self, w: Writer) -> None:
        if self.outer:
            with w.block(f"if ((item - begin) % {_FLUSH_ROWS} == {_FLUSH_ROWS - 1}) {{"):
                self._flush(w)

    def _flush(self, w: Writer) -> None:
        for m in self.outer:
            with w.block(f"for (int64_t i = 0; i < width; i += {self.frame.lanes}) {{"):
                self._flush_vector(w, m)

    def _flush_vector(self, w: Writer, m: Member) -> None:
        cpp, name = COMPUTE_TYPE[m.loop.value.dtype], self.frame.short(m)
        if self._keeps_lost(m):
            w.line(f"pf::flush_sums(sum_{name} + i, new_{name} + i, lost_{name} + i);")
            return
        first = identity(m.loop.kind, m.loop.value.dtype)
        both = f"pf::loadv<{cpp}>(sum_{name} + i), pf::loadv<{cpp}>(new_{name} + i)"
        w.line(f"pf::storev<{cpp}>(sum_{name} + i, {COMBINE[m.loop.kind]}({both}));")
        w.line(f"pf::storev<{cpp}>(new_{name} + i, pf::splat({first}));")

    def finish_thread(self, w: Writer) -> None:
        self._flush(w)
        for m in self.all:
            name = self.frame.short(m)
            w.line(f"part_{name}[thread] = all_{name}.finish();")

    def combine(self, w: Writer) -> None:
        """Combine the threads' partial results in thread order, and store them."""
        for m in self.all:
            part = f"part_{self.frame.short(m)}"
            joined = f"{COMBINE[m.loop.kind]}({part}[0], {part}[i])"
            w.line(f"for (int i = 1; i < used; ++i) {part}[0] = {joined};")
            self.frame.store_result(w, m, f"{part}[0]")
        for m in self.outer:
            self._combine_columns(w, m)

    def _combine_columns(self, w: Writer, m: Member) -> None:
        frame, cpp = self.frame, COMPUTE_TYPE[m.loop.value.dtype]
        axes = [a for a in frame.shape.columns if a.atom is not None]
        with w.blocks(frame.loop_over(a) for a in axes):
            flat = frame.flat_column()
            w.line(f"{cpp} total = ({self._sums(m, '0')})[{flat}];")
            joined = f"{COMBINE[m.loop.kind]}(total, ({self._sums(m, 'i')})[{flat}])"
            w.line(f"for (int i = 1; i < used; ++i) total = {joined};")
            if self._keeps_lost(m):
                lost = f"({self._sums(m, 'i')})[{flat} + 2 * width]"
                w.line("float lost = 0;")
                w.line(f"for (int i = 0; i < used; ++i) lost += {lost};")
                w.line("if (lost == lost) total += lost;  // else a sum was infinite")
            frame.store_result(w, m, "total")
