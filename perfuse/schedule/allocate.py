"""`with_memory`: the turns of a plan, and the memory of each buffer and piece of scratch.

On a CPU a turn is a call, or the kernels between two calls. On a GPU, kernels run in the order of
their stream: what dies inside a turn is reused there, and where much memory dies the turn ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from perfuse.ir.program import ARGUMENTS, Buffer, BufferKind, Opaque, View
from perfuse.schedule import arena
from perfuse.schedule.arena import (
    first_and_last,
    held_by_results,
    num_bytes,
    output_buffers,
    touched,
)
from perfuse.schedule.plan import Kernel, Plan, Step
from perfuse.schedule.turns import Allocation, MemoryPlan, MemorySource, Scratch, Turn

# Scratch of one kernel that shares a piece of memory starts at multiples of this.
ALIGNMENT = 256

ScratchOf = Mapping[str, Sequence[Scratch]]  # by kernel
NO_SCRATCH: ScratchOf = MappingProxyType({})


def with_memory(plan: Plan, *, is_gpu: bool, scratch: ScratchOf = NO_SCRATCH) -> Plan:
    """The plan, holding the decision about its memory.

    The scratch of a GPU kernel is known once its source is: until then the decision is without it.
    """
    return replace(plan, memory=_Decision(plan, is_gpu, scratch).run())


def scratch_name(kernel: Kernel, scratch: str) -> str:
    """A name for a kernel's scratch that is unique in the program."""
    return f"{kernel.name}_{scratch}"


def leaving_names(plan: Plan) -> set[str]:
    """Buffers and opaque values that the program returns."""
    outputs: list[Any] = list(plan.program.outputs)
    return output_buffers(plan.program) | {o.name for o in outputs if isinstance(o, Opaque)}


def seen_by_calls(plan: Plan) -> set[str]:
    """Buffers that library calls read or write: their layout matters, not only their size."""
    calls = [step for step in plan.steps if not isinstance(step, Kernel)]
    return {name for step in calls for name in touched(step)}


def _carried_tensors(plan: Plan) -> Iterator[str]:
    """Tensors that only calls read; not numbers, which the host may use as sizes later."""
    for step in plan.steps:
        for value in () if isinstance(step, Kernel) else step.leaves():
            if isinstance(value, Opaque) and isinstance(value.meta, torch.Tensor):
                yield value.name


def freed_inputs(plan: Plan) -> set[str]:
    """Donated inputs that are freed after their last use."""
    buffers, smallest = plan.program.buffers, plan.thresholds.forget_bytes
    found = {name for name in plan.program.donated if name in buffers}
    found = {name for name in found if arena.is_forgotten_early(buffers[name], smallest)}
    return found - leaving_names(plan)


def _rounded_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Decision:
    """Walks the steps in order; a turn is complete when it ends."""

    def __init__(self, plan: Plan, is_gpu: bool, scratch: ScratchOf) -> None:
        self.plan = plan
        self.buffers = plan.program.buffers
        self.is_gpu = is_gpu
        self.scratch = scratch
        _, self.last_use = first_and_last(map(touched, plan.steps))
        self.leaving = leaving_names(plan)
        self.held = held_by_results(plan.steps)
        self.with_layout = self.leaving | seen_by_calls(plan)
        self.carried = set(_carried_tensors(plan))
        self.made: set[str] = set()
        # What is freed after its last use, with its bytes where they are known.
        self.alive = {name: num_bytes(self.buffers[name]) for name in freed_inputs(plan)}
        self.arena_start = _rounded_up(plan.arena_bytes) if is_gpu else plan.arena_bytes
        self.arena_bytes = self.arena_start  # and scratch behind it
        self.turns: list[Turn] = []
        # Of the turn that has not ended yet:
        self.allocated: list[tuple[Allocation, ...]] = []
        self.freed: list[str] = []
        self.spare: dict[str, int] = {}  # dead temporaries, with their bytes
        self.first_owner: dict[str, str] = {}  # of memory that was reused
        self.last_owner: dict[str, str] = {}  # by the first one

    def run(self) -> MemoryPlan:
        steps = self.plan.steps
        unread = sorted(self.alive.keys() - self.last_use.keys())
        begins_with_call = not steps or not isinstance(steps[0], Kernel)
        at_entry = tuple(unread) if self.is_gpu and begins_with_call else ()
        self.freed += () if at_entry else unread
        for number, step in enumerate(steps):
            if not isinstance(step, Kernel):
                self._end_turn(number)
            self._add(step, number)
        self._end_turn(len(steps))
        outputs = [name for name in _results(self.plan) if self._is_missing(name)]
        at_exit = tuple(self._of_buffer(name) for name in dict.fromkeys(outputs))
        return MemoryPlan(tuple(self.turns), self.arena_bytes, at_entry, at_exit)

    def _add(self, step: Step, number: int) -> None:
        added = tuple(self._added(step))
        self.allocated.append(added)
        own = {a.name for a in added if a.source is not MemorySource.PART} - self.buffers.keys()
        names = sorted(touched(step) | own)
        dying = [n for n in names if n in self.alive and self.last_use.get(n, number) == number]
        self.freed += dying
        if self._ends_turn(step, dying):
            self._end_turn(number + 1)
            return
        known = [self.buffers[n] for n in dying if n in self.buffers]
        known = [b for b in known if b.name not in self.held]
        temporaries = [b.name for b in known if b.kind == BufferKind.TEMP]
        self.spare |= {n: size for n in temporaries if (size := self.alive[n])}

    def _ends_turn(self, step: Step, dying: Sequence[str]) -> bool:
        if not isinstance(step, Kernel):
            return True
        if not self.is_gpu:
            return self.plan.is_guarded and step.batch is None  # each kernel is checked by itself
        sizes = [self.alive[name] for name in dying]
        # Freeing much memory is worth a separate launch call (about a microsecond).
        return None in sizes or sum(filter(None, sizes)) >= self.plan.thresholds.gpu_release_bytes

    def _end_turn(self, stop: int) -> None:
        if self.allocated:
            first = stop - len(self.allocated)
            self.turns.append(Turn(first, tuple(self.allocated), tuple(sorted(self.freed))))
            self.allocated, self.freed = [], []
        self.spare.clear()

    # -- where memory comes from -----------------------------------------------------------

    def _added(self, step: Step) -> Iterator[Allocation]:
        """Memory for what the step is the first to touch."""
        if isinstance(step, Kernel):
            names = sorted(touched(step))
        else:
            names = [view.buffer for view in step.views()]
            names += [name for name in step.outs if step.into_out and name is not None]
        for name in names:
            if self._is_missing(name):
                yield self._of_buffer(name)
        if isinstance(step, Kernel):
            yield from self._of_scratch(step)
        elif not step.into_out:
            for name in filter(None, step.outs):
                if name in self.buffers or name in self.carried:
                    yield self._owned(Allocation(name, MemorySource.CALL, self._bytes(name)))

    def _is_missing(self, name: str) -> bool:
        if name in self.made or name not in self.buffers:
            return False
        return self.buffers[name].kind not in (*ARGUMENTS, BufferKind.EXTERN)

    def _bytes(self, name: str) -> int | None:
        """A value that is not a tensor of the program counts nothing."""
        return num_bytes(self.buffers[name]) if name in self.buffers else 0

    def _of_buffer(self, name: str) -> Allocation:
        buffer, size = self.buffers[name], self._bytes(name)
        if name in self.plan.places:
            self.made.add(name)
            return Allocation(name, MemorySource.ARENA, size, offset=self.plan.places[name])
        first = self.plan.over.get(name)
        old = self._spare_for(buffer) if first is None else self.last_owner.get(first, first)
        if old is None:
            return self._owned(Allocation(name, MemorySource.NEW, size))
        self.spare.pop(old, None)
        self.first_owner[name] = self.first_owner.get(old, old)
        self.last_owner[self.first_owner[name]] = name
        return self._owned(Allocation(name, MemorySource.REUSED, size, of=old))

    def _owned(self, made: Allocation) -> Allocation:
        """Memory that is freed after its last use, unless the program returns it."""
        self.made.add(made.name)
        if made.name not in self.leaving:
            self.alive[made.name] = made.num_bytes
        return made

    def _spare_for(self, buffer: Buffer) -> str | None:
        """A dead temporary of this turn whose memory fits a buffer."""
        if buffer.kind != BufferKind.TEMP:
            return None
        size, layout = num_bytes(buffer), (buffer.dtype, buffer.shape, buffer.strides)
        for name, spare in self.spare.items() if self.is_gpu else ():
            old = self.buffers[self.first_owner.get(name, name)]
            has_layout = (old.dtype, old.shape, old.strides) == layout
            if spare == size and (has_layout or buffer.name not in self.with_layout):
                return name
        return None

    # -- scratch ---------------------------------------------------------------------------

    def _of_scratch(self, kernel: Kernel) -> Iterator[Allocation]:
        """Small scratch is in the arena; larger scratch of known size is one piece of memory."""
        needed = [s for s in self.scratch.get(kernel.name, ()) if not s.is_kept]
        sizes = {scratch_name(kernel, s.name): s.num_bytes for s in needed}
        known = {name: size for name, size in sizes.items() if size is not None}
        if sum(known.values()) <= self.plan.thresholds.gpu_scratch_bytes:
            yield from self._in_arena(known)
        elif len(known) > 1:
            yield from self._in_one_piece(scratch_name(kernel, "scratch"), known)
        else:
            known = {}
        for name, size in sizes.items():
            if name not in known:
                yield self._owned(Allocation(name, MemorySource.NEW, size))

    def _in_arena(self, sizes: Mapping[str, int]) -> Iterator[Allocation]:
        """Behind the plan's places, at one place for all kernels: they run one after another."""
        offset = self.arena_start
        for name, size in sizes.items():
            yield Allocation(name, MemorySource.ARENA, size, offset=offset)
            band = ALIGNMENT if self.plan.is_guarded else 0
            offset += band + _rounded_up(size)
        self.arena_bytes = max(self.arena_bytes, offset)

    def _in_one_piece(self, piece: str, sizes: Mapping[str, int]) -> Iterator[Allocation]:
        total = sum(map(_rounded_up, sizes.values()))
        yield self._owned(Allocation(piece, MemorySource.NEW, total))
        offset = 0
        for name, size in sizes.items():
            yield Allocation(name, MemorySource.PART, size, of=piece, offset=offset)
            offset += _rounded_up(size)


def _results(plan: Plan) -> list[str]:
    """The buffers behind the program's results, in order."""
    return [o.buffer for o in plan.program.outputs if isinstance(o, View)]
