"""Scans: running sums and products along the columns of a row.

Where another axis is contiguous, every lane is a row of its own; else lanes run along the scan.
Floats accumulate in double, as eager's do.
"""

from __future__ import annotations

from perfuse.codegen.cpp.emit import Emitter, Scope, Value
from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.cpp.spelling import COMBINE, COMPUTE_TYPE, identity
from perfuse.codegen.writer import Writer
from perfuse.ir.dtype import DType
from perfuse.ir.program import LoopKind

_ALONG = {LoopKind.CUMSUM: "pf::running_sum", LoopKind.CUMPROD: "pf::running_product"}


class Scan:
    """The text of one row of a scan, or of a vector of rows."""

    def __init__(self, frame: CppFrame) -> None:
        self.frame, self.shape = frame, frame.shape
        (self.member,) = frame.kernel.members
        self.axis = frame.shape.columns[-1]
        value = self.member.loop.value.dtype
        self.wide = DType.F64 if value.is_float else value
        self.cpp = COMPUTE_TYPE[self.wide]

    def item(self, w: Writer) -> None:
        first = identity(self.member.loop.kind, self.wide)
        lane = self.shape.lane_axis
        if lane is None:
            w.line(f"{self.cpp} running = {first};")
            self._steps(w, None)
        elif not self.shape.is_vertical:
            w.line(f"{self.cpp} running = {first};")
            self._along(w)
        else:
            w.line(f"pf::vec<{self.cpp}> running = pf::splat<{self.cpp}>({first});")
            lanes = self.frame.lanes
            w.line(f"const int64_t left = int64_t({self.frame.dim(lane.size)}) - {lane.name};")
            with w.block(f"if (left >= {lanes}) {{"):
                self._steps(w, None)
            with w.block("else {"):
                w.line("const int live = (int)left;")
                self._steps(w, "live")

    def _steps(self, w: Writer, tail: str | None) -> None:
        """Element by element of the rows."""
        combine, is_vector = COMBINE[self.member.loop.kind], self.shape.lane_axis is not None
        with w.block(self.frame.loop_over(self.axis)):
            emitter = self._emitter(w, tail)
            value = emitter.value(self.member.loop.value)
            text = value.vector if is_vector else value.text
            w.line(f"running = {combine}(running, pf::cast<{self.cpp}>({text}));")
            self._store(emitter, "running", is_vector=is_vector)

    def _along(self, w: Writer) -> None:
        """Vector by vector along the scan."""
        name, lanes = self.axis.name, self.frame.lanes
        total = f"int64_t({self.frame.dim(self.axis.size)})"
        w.line(f"int64_t {name} = 0;")
        with w.block(f"for (; {name} + {lanes} <= {total}; {name} += {lanes}) {{"):
            self._vector(w, None)
        with w.block(f"if ({name} < {total}) {{"):
            w.line(f"const int live = (int)({total} - {name});")
            self._vector(w, "live")

    def _vector(self, w: Writer, tail: str | None) -> None:
        emitter = self._emitter(w, tail)
        value = emitter.value(self.member.loop.value)
        function = _ALONG[self.member.loop.kind]
        w.line(f"const auto sums = {function}(pf::cast<{self.cpp}>({value.vector}), running);")
        self._store(emitter, "sums", is_vector=True)

    def _emitter(self, w: Writer, tail: str | None) -> Emitter:
        shape = self.shape
        axes = (*shape.rows, self.axis, *([shape.lane_axis] if shape.lane_axis else []))
        known = frozenset(a.atom for a in axes if a.atom is not None)
        return Emitter(self.frame.names, Scope(w, known, None), shape.lane, tail, lambda e: None)

    def _store(self, emitter: Emitter, name: str, *, is_vector: bool) -> None:
        loop = self.member.loop
        target = self.frame.buffers[loop.out].dtype.compute
        text = f"pf::cast<{COMPUTE_TYPE[target]}>({name})"
        emitter.store(loop.out, loop.index, Value(text, target, is_vector))
