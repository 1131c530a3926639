"""When each buffer of a plan takes memory: launch by launch, as the host program makes and forgets.

The host works in *turns*: the kernels between two calls, launched in one go, or one call. Before a
turn it makes what the turn touches, after it it forgets what no later turn touches. On a GPU a turn
also ends where much memory dies, and what dies inside one is used again there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfuse.context import Context
from perfuse.ir.program import Buffer, LibraryCall, View
from perfuse.schedule.likely import Hints, value_of
from perfuse.schedule.memory import (
    allocated_bytes,
    first_and_last,
    is_forgotten_early,
    num_bytes,
    output_buffers,
    touched,
)
from perfuse.schedule.plan import Plan, Step
from perfuse.schedule.workspace import workspace_of_call, workspace_of_kernel

ARENA_SLACK = 64  # the runtime aligns the arena itself


@dataclass(frozen=True, slots=True)
class Where:
    """Where a plan runs, and on how many threads of a CPU or processors of a GPU."""

    device: str = "cpu"
    num_parallel: int = 1

    @staticmethod
    def of(context: Context) -> Where:
        gpu = context.target.gpu
        count = context.target.num_threads if gpu is None else gpu.multiprocessors
        return Where(context.device.type, count)


ONE_THREAD = Where()


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One buffer outside the arena: alive from turn `first` to turn `last`, both included."""

    buffer: str
    # "temporary", "result", "input" (one that is given up to the program) or "workspace" (what a
    # step takes while it runs)
    kind: str
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

    def series(self, kind: str) -> list[int]:
        """Bytes of the buffers of one kind, by turn."""
        changes = [0] * (self.num_turns + 1)
        for item in self.items:
            if item.kind == kind:
                changes[min(item.first, self.num_turns)] += item.num_bytes
                if item.last < self.num_turns:
                    changes[item.last + 1] -= item.num_bytes
        total, sums = 0, []
        for change in changes[: self.num_turns]:
            total += change
            sums.append(total)
        return sums

    def peak(self) -> int:
        """The most that the program holds at a time, with what is given up to it."""
        kinds = [self.series(kind) for kind in ("temporary", "result", "input", "workspace")]
        return self.arena_bytes + max(map(sum, zip(*kinds, strict=True)), default=0)


def lifetimes(plan: Plan, where: Where = ONE_THREAD) -> Lifetimes:
    """The lifetimes of a plan's buffers; symbols count with their likely sizes."""
    turns = turns_of(plan, where.device)
    used = (sorted({name for step in steps for name in touched(step)}) for steps in turns)
    first, last = first_and_last(used)
    leaving = output_buffers(plan.program)
    shared = plan.over if where.device == "cpu" else _reused(plan, turns)
    for name, old in shared.items():
        # The memory counts once, for the one that lasts longer.
        kept, dropped = (name, old) if name in leaving else (old, name)
        first[kept], last[kept] = first[old], max(last[old], last[name])
        del first[dropped]
    return Lifetimes(
        tuple(_label(steps) for steps in turns),
        _arena(plan.arena_bytes, where.device),
        (*_buffers(plan, where.device, first, last, len(turns)), *_workspaces(plan, where)),
        tuple(o.buffer if isinstance(o, View) else None for o in plan.program.outputs),
        tuple(i if i in plan.program.buffers else None for i in plan.program.inputs),
    )


def _buffers(
    plan: Plan, device: str, first: Mapping[str, int], last: Mapping[str, int], num_turns: int
) -> Iterator[Lifetime]:
    leaving = output_buffers(plan.program)
    for name, buffer in plan.program.buffers.items():
        if name in plan.places or not _is_counted(buffer, plan, first):
            continue
        stays = name in leaving or (buffer.role == "input" and not _is_forgotten(buffer, plan))
        ends = num_turns if stays else last.get(name, 0)
        begins = 0 if buffer.role == "input" else first[name]
        size = buffer_bytes(buffer, plan.program.hints, device)
        yield Lifetime(name, _kind(buffer, leaving), size, begins, ends)


def _workspaces(plan: Plan, where: Where) -> Iterator[Lifetime]:
    """The most that any step of a turn takes while it runs."""
    buffers, hints = plan.program.buffers, plan.program.hints

    def taken(step: Step) -> int:
        if isinstance(step, LibraryCall):
            return workspace_of_call(step, buffers, hints, where.device, where.num_parallel)
        if where.device == "cpu":
            return 0  # a thread's own memory, kept
        return workspace_of_kernel(step, buffers, hints, where.num_parallel)

    for number, steps in enumerate(turns_of(plan, where.device)):
        # Scratch of all kernels of a turn is made before it is launched.
        size = sum(map(taken, steps))
        if size:
            label = f"workspace of {_label(steps)}"
            yield Lifetime(label, "workspace", size, number, number)


def _is_counted(buffer: Buffer, plan: Plan, first: Mapping[str, int]) -> bool:
    """Its memory comes or goes with the program: made by it, or given up to it."""
    if buffer.role == "input":
        return buffer.name in plan.program.given_up
    return buffer.role != "constant" and buffer.name in first


def turns_of(plan: Plan, device: str = "cpu") -> list[list[Step]]:
    """Steps as the host runs them: kernels in a row together, each call by itself."""
    _, last = first_and_last(map(touched, plan.steps))
    turns: list[list[Step]] = []
    ended = True
    for number, step in enumerate(plan.steps):
        if ended or isinstance(step, LibraryCall) or isinstance(turns[-1][-1], LibraryCall):
            turns.append([step])
        else:
            turns[-1].append(step)
        ended = device != "cpu" and _is_much(_dying(plan, step, last, number), plan)
    return turns


def _dying(plan: Plan, step: Step, last: Mapping[str, int], number: int) -> list[Buffer]:
    """Buffers that the host forgets after this step."""
    leaving = output_buffers(plan.program)
    found = [plan.program.buffers.get(n) for n in sorted(touched(step)) if last[n] == number]
    return [b for b in found if b is not None and _is_ours(b, plan) and b.name not in leaving]


def _is_ours(buffer: Buffer, plan: Plan) -> bool:
    if buffer.role == "input":
        return buffer.name in plan.program.given_up and _is_forgotten(buffer, plan)
    return buffer.role != "constant"


def _is_forgotten(buffer: Buffer, plan: Plan) -> bool:
    return is_forgotten_early(buffer, plan.thresholds.forget_bytes)


def _is_much(buffers: Sequence[Buffer], plan: Plan) -> bool:
    sizes = [num_bytes(buffer) for buffer in buffers]
    known = sum(filter(None, sizes))
    return any(size is None for size in sizes) or known >= plan.thresholds.gpu_release_bytes


def _reused(plan: Plan, turns: Sequence[Sequence[Step]]) -> dict[str, str]:
    """Temporaries of a turn that lie where one of equal size died in it: name -> the first."""
    _, last = first_and_last(map(touched, plan.steps))
    shown = output_buffers(plan.program).union(
        *(touched(step) for step in plan.steps if isinstance(step, LibraryCall))
    )
    buffers = plan.program.buffers
    taken: dict[str, str] = {}
    seen: set[str] = set()
    number = 0
    for steps in turns:
        spare: list[Buffer] = []
        for step in steps:
            for name in sorted(touched(step) - seen):
                seen.add(name)
                old = _spare_for(buffers.get(name), spare, name not in shown)
                if old is not None:
                    spare.remove(old)
                    taken[name] = old.name
            dead = [b for b in _dying(plan, step, last, number) if b.role == "temp"]
            spare += [buffers[taken.get(b.name, b.name)] for b in dead]
            number += 1
    return taken


def _spare_for(buffer: Buffer | None, spare: Sequence[Buffer], is_private: bool) -> Buffer | None:
    """A dead temporary whose memory serves; what others see has to be laid out like it too."""
    if buffer is None or buffer.role != "temp":
        return None
    fits = [b for b in spare if num_bytes(b) is not None and num_bytes(b) == num_bytes(buffer)]
    layout = (buffer.dtype, buffer.shape, buffer.strides)
    return next((b for b in fits if is_private or (b.dtype, b.shape, b.strides) == layout), None)


def _label(steps: Sequence[Step]) -> str:
    names = [step.op if isinstance(step, LibraryCall) else step.name for step in steps]
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"


def _kind(buffer: Buffer, leaving: set[str]) -> str:
    if buffer.role == "input":
        return "input"
    return "result" if buffer.name in leaving else "temporary"


def _arena(num_bytes: int, device: str) -> int:
    return allocated_bytes(num_bytes + ARENA_SLACK, device) if num_bytes else 0


def buffer_bytes(buffer: Buffer, hints: Hints, device: str = "cpu") -> int:
    """What a buffer takes from its allocator."""
    size = value_of(buffer.num_elements, hints) * buffer.dtype.num_bytes
    return allocated_bytes(size, device)
