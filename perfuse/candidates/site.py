"""`Site`: matmuls of a plan with the kernel that reads them, for which sources propose choices."""

from __future__ import annotations

from dataclasses import dataclass

from perfuse.decision import FUSED, Choice, library
from perfuse.ir.program import Matmul
from perfuse.schedule.contract import sizes_of
from perfuse.schedule.plan import Kernel, Step


@dataclass(frozen=True, slots=True)
class Site:
    """Matmuls, the kernel that reads their results if there is one, and both as one kernel.

    Templates widen int8 operands while they read them; for the library, kernels do so before.
    """

    matmuls: tuple[Matmul, ...]
    epilogue: Kernel | None
    alone: tuple[Kernel, ...]  # a contraction for each matmul; empty where one has none
    fused: Kernel | None
    widening: tuple[Kernel, ...] = ()

    @property
    def default(self) -> Choice:
        """The library's call."""
        return library(self.matmuls[0].op)

    @property
    def steps(self) -> tuple[Step, ...]:
        last = () if self.epilogue is None else (self.epilogue,)
        return (*self.widening, *self.matmuls, *last)

    @property
    def contracted(self) -> tuple[Matmul, ...]:
        """The matmuls as generated kernels compute them: from operands as they are stored."""
        found = [self.fused] if self.fused is not None else self.alone
        made = [k.contraction.matmuls for k in found if k is not None and k.contraction is not None]
        return tuple(matmul for matmuls in made for matmul in matmuls)

    def kernels(self, choice: Choice) -> tuple[Kernel, ...]:
        """The contractions that a choice asks for; none for the library's call."""
        if choice == self.default:
            return ()
        if dict(choice.options).get(FUSED):
            assert self.fused is not None
            return (self.fused,)
        return self.alone

    def __str__(self) -> str:
        sizes = ", ".join("x".join(map(repr, sizes_of(m))) for m in self.matmuls)
        ops = " and ".join(dict.fromkeys(m.op.split(".")[1] for m in self.matmuls))
        return f"{ops} {sizes}" + ("" if self.epilogue is None else f" with {self.epilogue.name}")
