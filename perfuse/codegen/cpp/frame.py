"""State shared by all parts of a kernel: its names, its shape, and the text of sizes."""

from __future__ import annotations

from collections.abc import Mapping

from perfuse.codegen.cpp.emit import Names, Value, sigmoids_used_once
from perfuse.codegen.cpp.shape import KernelShape, shape_of
from perfuse.codegen.cpp.spelling import ACCUMULATOR, COMPUTE_TYPE
from perfuse.codegen.emitter import KernelFrame
from perfuse.codegen.writer import Writer
from perfuse.context import Context
from perfuse.ir import index as ix
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis, Buffer
from perfuse.schedule.plan import Kernel, Member, static_product


class CppFrame(KernelFrame[Names, Value]):
    """One C++ kernel being written."""

    def __init__(
        self,
        kernel: Kernel,
        buffers: Mapping[str, Buffer],
        context: Context,
        read_again: frozenset[str],
        over: Mapping[str, str],
    ) -> None:
        once = sigmoids_used_once(m.loop.value for m in kernel.members)
        super().__init__(kernel, buffers, Names(buffers, over, once))
        self.read_again = read_again  # buffers that a step of the program reads from memory
        self.settings = context.settings
        self.target = context.target
        self.lanes = context.target.lanes
        self.shape: KernelShape = shape_of(kernel, self.lanes)

    def accumulator(self, member: Member) -> str:
        place = f", {self.place_type(member)}" if member.loop.kind.is_position else ""
        return f"{ACCUMULATOR[member.loop.kind]}<{COMPUTE_TYPE[member.loop.value.dtype]}{place}>"

    def place_type(self, member: Member) -> str:
        """The type of positions among those that a loop reduces."""
        count = static_product([a.size for a in member.loop.axes if a.reduced])
        return "int32_t" if count is not None and count < 1 << 31 else "int64_t"

    def count(self, axes: tuple[Axis, ...]) -> str:
        return " * ".join(f"int64_t({self.dim(a.size)})" for a in axes) or "int64_t(1)"

    def flat_column(self) -> str:
        """The place of a column within its row."""
        total: Dim = 0
        for axis in self.shape.columns:
            total = ix.add(ix.mul(total, axis.size), ix.var(axis.name, axis.size))
        return self.dim(total)

    def loop_over(self, axis: Axis) -> str:
        name, first, last = axis.name, "0", self.dim(axis.size)
        if axis is self.shape.tile_axis:
            first, last = "top", "bottom"
        return f"for (int64_t {name} = {first}; {name} < {last}; ++{name}) {{"

    def store_result(self, w: Writer, member: Member, text: str) -> None:
        """Store one finished value of a reduction at the member's own place."""
        out = member.loop.out
        pointer, kind = self.names.target(out), self.names.storage(out)
        target = COMPUTE_TYPE[self.buffers[out].dtype.compute]
        at = self.dim(member.loop.index)
        w.line(f"pf::store1<{kind}>({pointer} + {at}, pf::cast<{target}>({text}));")
