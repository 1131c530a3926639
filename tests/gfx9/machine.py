"""Runs a launch: workgroups in batches, their waves in step as far as branches allow.

Waves at the same instruction run together. A branch that not all of them take divides them, and
they meet again where one part arrives at the other's instruction: those furthest behind run first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.gfx9.assembly import VCC, Assembly, Instruction
from tests.gfx9.decode import Run, decode
from tests.gfx9.errors import Gfx9Error, KernelFailed
from tests.gfx9.memory import LocalMemory, Memory
from tests.gfx9.waves import LANES, NUM_SCALARS, Waves, merged

Array = np.ndarray[Any, Any]

MAX_WAVES = 256  # that run in step, which bounds the memory of their registers
MAX_STEPS = 20_000_000

# Branch -> which waves take it.
TAKEN: dict[str, Callable[[Waves], Array]] = {
    "s_branch": lambda w: np.ones(w.count, bool),
    "s_cbranch_scc0": lambda w: ~w.scc,
    "s_cbranch_scc1": lambda w: w.scc,
    "s_cbranch_vccz": lambda w: w.scalar64(VCC) == 0,
    "s_cbranch_vccnz": lambda w: w.scalar64(VCC) != 0,
    "s_cbranch_execz": lambda w: ~w.exec.any(axis=1),
    "s_cbranch_execnz": lambda w: w.exec.any(axis=1),
}


@dataclass
class Kernel:
    """A kernel to be launched: its text, and the size of its workgroups."""

    assembly: Assembly
    num_threads: int
    local_bytes: int
    decoded: dict[int, Run] = field(default_factory=dict)
    executed: set[str] = field(default_factory=set)  # the mnemonics that ran

    def effect(self, place: int) -> Run:
        """The effect of an instruction, which is decoded when it is first reached."""
        if place not in self.decoded:
            instruction = self.assembly.instructions[place]
            self.decoded[place] = decode(instruction)
            self.executed.add(instruction.op)
        return self.decoded[place]

    def launch(self, grid: tuple[int, int, int], values: Sequence[int], memory: Memory) -> None:
        """Run all workgroups. `values` are the arguments that are passed, without hidden ones."""
        kernarg = np.zeros(max(8, self.assembly.kernarg_bytes), np.uint8)
        passed = [a for a in self.assembly.arguments if not a.kind.startswith("hidden")]
        for argument, value in zip(passed, itertools.chain(values, itertools.repeat(0))):  # noqa: B905
            data = (value & (1 << 8 * argument.size) - 1).to_bytes(argument.size, "little")
            kernarg[argument.offset : argument.offset + argument.size] = np.frombuffer(
                data, np.uint8
            )
        region = kernarg.ctypes.data, len(kernarg)
        x, y, z = (range(n) for n in grid)
        groups = [(i, j, k) for k in z for j in y for i in x]
        step = max(1, MAX_WAVES * LANES // self.num_threads)
        with np.errstate(all="ignore"):
            for first in range(0, len(groups), step):
                self._run(groups[first : first + step], memory.with_region(region), region[0])

    def _run(self, groups: list[tuple[int, int, int]], memory: Memory, kernarg: int) -> None:
        local = LocalMemory(len(groups), self.local_bytes)
        waves = self._first(groups, memory, local, kernarg)
        Scheduler(self, waves).run()

    def _first(
        self, groups: list[tuple[int, int, int]], memory: Memory, local: LocalMemory, kernarg: int
    ) -> Waves:
        """The waves as they start: an address in s[0:1], the workgroup after it, the lane in v0."""
        settings, per_group = self.assembly.settings, -(-self.num_threads // LANES)
        count = per_group * len(groups)
        scalars = np.full((NUM_SCALARS, count), 0xDEADBEEF, np.uint32)
        scalars[0], scalars[1] = kernarg & 0xFFFFFFFF, kernarg >> 32
        place = settings["user_sgpr_count"]
        for axis, name in enumerate("xyz"):
            if settings[f"system_sgpr_workgroup_id_{name}"]:
                scalars[place] = np.repeat([group[axis] for group in groups], per_group)
                place += 1
        vectors = {
            kind: np.full((number, count, LANES), 0xDEADBEEF, np.uint32)
            for kind, number in self.assembly.num_registers.items()
        }
        thread = np.arange(per_group * LANES).reshape(per_group, LANES)
        vectors["v"][0] = np.tile(thread, (len(groups), 1))
        group = np.repeat(np.arange(len(groups)), per_group)
        is_on = np.tile(thread < self.num_threads, (len(groups), 1))
        scc = np.zeros(count, bool)
        start = self.assembly.labels[self.assembly.symbol]
        return Waves(scalars, vectors, is_on, scc, group, memory, local, start)


class Scheduler:
    """Runs waves until all have ended."""

    def __init__(self, kernel: Kernel, waves: Waves) -> None:
        self.kernel = kernel
        self.ready = [waves]
        self.waiting: list[Waves] = []  # at a barrier
        self.steps = 0

    def run(self) -> None:
        while self.ready or self.waiting:
            if not self.ready:
                # Every wave that has not ended is at a barrier: it opens for all.
                self.ready, self.waiting = self.waiting, []
            self._block(self._next())

    def _next(self) -> Waves:
        """Take those that are furthest behind, all that stand at the same instruction."""
        place = min(w.place for w in self.ready)
        here = [w for w in self.ready if w.place == place]
        self.ready = [w for w in self.ready if w.place != place]
        return here[0] if len(here) == 1 else merged(here)

    def _block(self, w: Waves) -> None:
        """Run up to the next branch, barrier or place where others may join."""
        instructions, leaders = self.kernel.assembly.instructions, self.kernel.assembly.leaders
        while True:
            instruction = instructions[w.place]
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise KernelFailed(f"{self._name()} has not ended after {MAX_STEPS} instructions")
            if instruction.op == "s_endpgm":
                return
            if instruction.op == "s_barrier":
                w.place += 1
                self.waiting.append(w)
                return
            if instruction.op in TAKEN:
                self._branch(w, instruction)
                return
            self._execute(w, instruction)
            w.place += 1
            if w.place in leaders:
                self.ready.append(w)
                return

    def _execute(self, w: Waves, instruction: Instruction) -> None:
        try:
            self.kernel.effect(w.place)(w)
        except Gfx9Error as error:
            where = f"{self._name()}, instruction {w.place}: {instruction.text}"
            raise type(error)(f"{where}\n{error}") from error
        except Exception as error:
            where = f"{self._name()}, instruction {w.place}: {instruction.text}"
            raise Gfx9Error(f"{where}\n{type(error).__name__}: {error}") from error

    def _branch(self, w: Waves, instruction: Instruction) -> None:
        taken = TAKEN[instruction.op](w)
        place = self.kernel.assembly.labels[instruction.operands[0].text]
        if taken.all():
            w.place = place
            self.ready.append(w)
            return
        if taken.any():
            others = w.chosen(taken)
            others.place = place
            self.ready.append(others)
            w = w.chosen(~taken)
        w.place += 1
        self.ready.append(w)

    def _name(self) -> str:
        return f"kernel {self.kernel.assembly.symbol}"
