"""What every part of a kernel's text shares: its names, its shape, and how sizes are spelled."""

from __future__ import annotations

from collections.abc import Mapping

from perfuse.codegen.cpp.emit import Emitter, Names, Value, sigmoids_used_once
from perfuse.codegen.cpp.shape import KernelShape, shape_of
from perfuse.codegen.cpp.spelling import ACCUMULATOR, COMPUTE_TYPE
from perfuse.codegen.writer import Writer
from perfuse.context import Context
from perfuse.ir import index as ix
from perfuse.ir.index import Atom, Dim
from perfuse.ir.program import Axis, Buffer
from perfuse.schedule.plan import Kernel, Member


class Frame:
    """One kernel being written."""

    def __init__(
        self,
        kernel: Kernel,
        buffers: dict[str, Buffer],
        context: Context,
        read_again: frozenset[str],
        over: Mapping[str, str],
    ) -> None:
        self.kernel = kernel
        self.read_again = read_again  # buffers that a step of the program reads from memory
        self.buffers = buffers
        self.settings = context.settings
        self.target = context.target
        self.lanes = context.target.lanes
        once = sigmoids_used_once(m.loop.value for m in kernel.members)
        self.names = Names(buffers, over, once)
        self.shape: KernelShape = shape_of(kernel, self.lanes)

    # -- members ---------------------------------------------------------------------------

    def of_role(self, *roles: str) -> list[Member]:
        return [m for m in self.kernel.members if m.role in roles]

    def short(self, member: Member) -> str:
        """A name for what belongs to a member: equal kernels have equal ones."""
        return f"m{self.kernel.members.index(member)}"

    def accumulator(self, member: Member) -> str:
        return f"{ACCUMULATOR[member.loop.kind]}<{COMPUTE_TYPE[member.loop.value.dtype]}>"

    def is_read_inside(self, name: str) -> bool:
        """Whether a member reads the buffer, and so may want its value from a register."""
        return any(r.attr[0] == name for m in self.kernel.members for r in m.loop.reads())

    def value_of(self, emitter: Emitter, member: Member, *, is_for_store: bool = False) -> Value:
        """A member's value in the compute type of its buffer; a store need not have it rounded."""
        formula, kind = member.loop.value, self.buffers[member.loop.out].dtype
        if formula.op == "round_to" and formula.attr is kind:
            if is_for_store or not self.is_read_inside(member.loop.out):
                formula = formula.args[0]  # the store rounds anyway
        return emitter.converted(emitter.value(formula), kind.compute)

    # -- sizes and places ------------------------------------------------------------------

    def dim(self, dim: Dim) -> str:
        """A size, in terms of the kernel's size arguments."""
        return ix.render(dim, self.atom)

    def count(self, axes: tuple[Axis, ...]) -> str:
        return " * ".join(f"int64_t({self.dim(a.size)})" for a in axes) or "int64_t(1)"

    def atom(self, atom: Atom) -> str:
        if atom.kind == "var":
            return str(atom.parts[0])
        if atom.kind == "sym":
            return self.names.symbol(atom.parts[0])
        assert atom.kind in ("div", "mod"), f"{atom} is read from data"
        a, b = (ix.render(p, self.atom) for p in atom.parts)
        if ix.is_nonnegative(ix.bounds(atom.parts[0])[0]):
            return f"(({a}) {'/' if atom.kind == 'div' else '%'} ({b}))"
        return f"pf::{'floordiv' if atom.kind == 'div' else 'mod'}(int64_t({a}), int64_t({b}))"

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
