"""The bytes of each buffer of a plan, and the turns in which it is alive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from perfuse.context import Context
from perfuse.ir.program import Buffer, BufferKind, LibraryCall, View
from perfuse.schedule.arena import allocated_bytes, output_buffers
from perfuse.schedule.plan import Plan, Step
from perfuse.schedule.size_hints import Hints, value_of
from perfuse.schedule.turns import MemorySource
from perfuse.schedule.workspace import workspace_of_call, workspace_of_kernel

ARENA_SLACK = 64  # the runtime aligns the arena itself


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a plan runs, and on how many threads of a CPU or processors of a GPU."""

    device: str = "cpu"
    num_parallel: int = 1

    @staticmethod
    def of(context: Context) -> Placement:
        gpu = context.target.gpu
        count = context.target.num_threads if gpu is None else gpu.multiprocessors
        return Placement(context.device.type, count)


ONE_THREAD = Placement()


class HeldAs(StrEnum):
    """The purpose that memory is held for."""

    TEMPORARY, RESULT = "temporary", "result"
    INPUT = "input"  # one that is donated to the program
    WORKSPACE = "workspace"  # what a step takes while it runs


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One buffer outside the arena: alive from turn `first` to turn `last`, both included."""

    buffer: str
    kind: HeldAs
    num_bytes: int
    first: int
    last: int  # the number of turns, where it outlives the program


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """A plan's memory over its turns."""

    labels: tuple[str, ...]  # what each turn runs
    arena_bytes: int
    items: tuple[Lifetime, ...]
    outputs: tuple[str | None, ...]  # the buffer behind each result of the program
    inputs: tuple[str | None, ...]  # the buffer behind each argument

    @property
    def num_turns(self) -> int:
        return len(self.labels)

    def series(self, kind: HeldAs) -> list[int]:
        """Bytes of the buffers of one kind, by turn."""
        return held((item for item in self.items if item.kind is kind), self.num_turns)

    def peak(self) -> int:
        """The peak of what the program holds, including donated inputs."""
        return self.arena_bytes + max(held(self.items, self.num_turns), default=0)


def held(items: Iterable[Lifetime], num_turns: int) -> list[int]:
    """The bytes of all these buffers, by turn."""
    changes = [0] * (num_turns + 2)
    for item in items:
        changes[min(item.first, num_turns)] += item.num_bytes
        changes[min(item.last, num_turns) + 1] -= item.num_bytes
    return list(accumulate(changes))[:num_turns]


def lifetimes(plan: Plan, where: Placement = ONE_THREAD) -> Lifetimes:
    """The lifetimes of a plan's buffers; symbols count with their likely sizes."""
    turns = [[plan.steps[n] for n in turn.numbers] for turn in plan.memory.turns]
    return Lifetimes(
        tuple(_label(steps) for steps in turns),
        _arena(plan.arena_bytes, where.device),
        (*_buffers(plan, where.device), *_workspaces(plan, turns, where)),
        tuple(o.buffer if isinstance(o, View) else None for o in plan.program.outputs),
        tuple(i if i in plan.program.buffers else None for i in plan.program.inputs),
    )


def _buffers(plan: Plan, device: str) -> Iterator[Lifetime]:
    leaving, num_turns = output_buffers(plan.program), len(plan.memory.turns)
    begins, ends = _spans(plan, leaving)
    for name, buffer in plan.program.buffers.items():
        if name in begins:
            last = num_turns if name in leaving else ends.get(name, num_turns)
            size = buffer_bytes(buffer, plan.program.hints, device)
            yield Lifetime(name, _kind(buffer, leaving), size, begins[name], last)


def _spans(plan: Plan, leaving: set[str]) -> tuple[dict[str, int], dict[str, int]]:
    """The turns in which each buffer outside of the arena is allocated and freed.

    Memory that is reused counts once: for its first owner, or for the result that it ends as.
    """
    memory, donated = plan.memory, plan.program.donated
    begins = {name: 0 for name in donated if name in plan.program.buffers}
    ends = dict.fromkeys(memory.freed_at_entry, 0)
    owner: dict[str, str] = {}
    for number, turn in enumerate(memory.turns):
        for made in (a for added in turn.allocated for a in added):
            if made.source is MemorySource.REUSED:
                first = owner.get(made.of, made.of)
                owner[made.name] = first
                if made.name in leaving:
                    begins[made.name] = begins.pop(first)
            elif made.source in (MemorySource.NEW, MemorySource.CALL):
                begins[made.name] = number
        ends |= {owner.get(name, name): number for name in turn.freed}
    return begins, ends


def _workspaces(
    plan: Plan, turns: Sequence[Sequence[Step]], where: Placement
) -> Iterator[Lifetime]:
    """The largest workspace of any step of a turn."""
    buffers, hints = plan.program.buffers, plan.program.hints

    def taken(step: Step) -> int:
        if isinstance(step, LibraryCall):
            return workspace_of_call(step, buffers, hints, where.device, where.num_parallel)
        if where.device == "cpu":
            return 0  # a thread's own memory, which persists
        return workspace_of_kernel(step, buffers, hints, where.num_parallel)

    for number, steps in enumerate(turns):
        # Scratch of all kernels of a turn is allocated before the launch.
        size = sum(map(taken, steps))
        if size:
            label = f"workspace of {_label(steps)}"
            yield Lifetime(label, HeldAs.WORKSPACE, size, number, number)


def _label(steps: Sequence[Step]) -> str:
    names = [step.op if isinstance(step, LibraryCall) else step.name for step in steps]
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"


def _kind(buffer: Buffer, leaving: set[str]) -> HeldAs:
    if buffer.kind == BufferKind.INPUT:
        return HeldAs.INPUT
    return HeldAs.RESULT if buffer.name in leaving else HeldAs.TEMPORARY


def _arena(num_bytes: int, device: str) -> int:
    return allocated_bytes(num_bytes + ARENA_SLACK, device) if num_bytes else 0


def buffer_bytes(buffer: Buffer, hints: Hints, device: str = "cpu") -> int:
    """The bytes that a buffer takes from its allocator."""
    size = value_of(buffer.num_elements, hints) * buffer.dtype.num_bytes
    return allocated_bytes(size, device)
