"""Host programs that check their memory: the lines they add, and the layout of the arena."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from perfuse.codegen.host.source import GuardRow
from perfuse.codegen.writer import Writer
from perfuse.ir.dtype import to_torch
from perfuse.schedule.arena import num_bytes, output_buffers, touched
from perfuse.schedule.plan import Plan


def guard_rows(plan: Plan) -> Iterator[GuardRow]:
    """The rows of a plan's buffers."""
    used: dict[str, list[int]] = {}
    for turn, run in enumerate(plan.memory.turns):
        for name in {name for number in run.numbers for name in touched(plan.steps[number])}:
            used.setdefault(plan.over.get(name, name), []).append(turn)
    for name in sorted(plan.places.keys() & used.keys()):
        buffer = plan.program.buffers[name]
        size = num_bytes(buffer)
        assert size is not None, "arena buffers have known sizes"
        kind, when = str(to_torch(buffer.dtype)), used[name]
        yield GuardRow(name, plan.places[name], size, kind, min(when), max(when))


class WatchedMemory:
    """The part of a host program's writer that allocates memory, checked on request."""

    # The functions of the host program that make a tensor: any, and one too small for the pool.
    allocator = "empty_strided"
    small_allocator = "empty_small"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.w = Writer(1)
        self.leaving = output_buffers(plan.program)
        self.turn = 0  # the one that is being written

    def _memory(self, name: str, layout: str, size: int | None = None) -> str:
        """New memory of a shape, strides and a dtype; `size` in bytes, where it is known."""
        if self.plan.is_guarded:
            return f"memory.empty({name!r}, {layout})"
        is_small = size is not None and size < self.plan.thresholds.pool_bytes
        return f"{self.small_allocator if is_small else self.allocator}({layout})"

    def _watch(self) -> None:
        """At entry: poison and guard the memory of this call."""
        if self.plan.is_guarded:
            self.w.line("memory = guard(frame)")

    def _run(self, line: str, what: str, copied: Sequence[str] = ()) -> None:
        """A line that runs a segment or a call, and what surrounds it.

        Results that alias an argument are copied before its memory is poisoned.
        """
        if self.plan.is_guarded:
            self.w.line(f"memory.before({self.turn})")
        self.w.line(line)
        for name in copied:
            self.w.line(f"{name} = {name}.clone()")
        if self.plan.is_guarded:
            self.w.line(f"memory.after({self.turn}, {what!r})")

    def _plain_results(self) -> None:
        """Before leaving: results as tensors that own their memory."""
        if self.plan.is_guarded:
            self.w.line("memory.finish()")
            made = {allocation.name for allocation in self.plan.memory.allocations()}
            self._own_memory(sorted(self.leaving & made))

    def _own_memory(self, names: Iterable[str]) -> None:
        """Results as tensors that are not views of guarded memory."""
        for name in names if self.plan.is_guarded else ():
            self.w.line(f"{name} = memory.result({name})")

    def _guards(self) -> tuple[GuardRow, ...]:
        return tuple(guard_rows(self.plan)) if self.plan.is_guarded else ()
