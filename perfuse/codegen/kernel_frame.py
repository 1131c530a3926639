"""`KernelFrame`: what every part of a kernel's text shares, in any language."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic

from perfuse.codegen.emitter import Emitter, N, V
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer
from perfuse.schedule.plan import Kernel, Member, Role


class KernelFrame(Generic[N, V]):
    """One kernel being written: its members, its names, and the formulas of its results."""

    def __init__(self, kernel: Kernel, buffers: Mapping[str, Buffer], names: N) -> None:
        self.kernel = kernel
        self.buffers = buffers
        self.names = names

    def of_role(self, *roles: Role) -> list[Member]:
        return [m for m in self.kernel.members if m.role in roles]

    def short(self, member: Member) -> str:
        """A name for what belongs to a member: equal kernels have equal ones."""
        return f"m{self.kernel.members.index(member)}"

    def is_read_inside(self, name: str) -> bool:
        """Whether a member reads the buffer, and so may take its value from a register."""
        return any(r.buffer == name for m in self.kernel.members for r in m.loop.reads())

    def formula_of(self, member: Member, *, is_for_store: bool = False) -> Expr:
        """A member's formula, not rounded where only a store uses it, which rounds anyway."""
        formula, out = member.loop.value, member.loop.out
        if formula.op == "round_to" and formula.attr is self.buffers[out].dtype:
            if is_for_store or not self.is_read_inside(out):
                return formula.args[0]
        return formula

    def value_of(self, emitter: Emitter[N, V], member: Member, *, is_for_store: bool = False) -> V:
        """A member's value in the compute type of its buffer."""
        value = emitter.value(self.formula_of(member, is_for_store=is_for_store))
        return emitter.converted(value, self.buffers[member.loop.out].dtype.compute)

    def dim(self, dim: Dim) -> str:
        """A size, in terms of the kernel's size arguments."""
        return self.names.dim(dim)
