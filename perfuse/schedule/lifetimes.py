"""When each buffer of a plan takes memory: launch by launch, as the host program makes and forgets.

The host works in *turns*: the kernels between two calls, launched in one go, or one call. Before a
turn it makes what the turn touches, after it it forgets what no later turn touches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfuse.ir.index import Atom, Dim
from perfuse.ir.program import Buffer, Extern, View
from perfuse.schedule.memory import (
    SMALLEST_POOLED,
    allocated_bytes,
    is_forgotten_early,
    output_buffers,
    touched,
)
from perfuse.schedule.plan import Plan, Step

UNKNOWN_SIZE = 4096  # of a symbol that nothing is known of
ARENA_SLACK = 64  # the runtime aligns the arena itself

Hints = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One buffer outside the arena: alive from turn `first` to turn `last`, both included."""

    buffer: str
    kind: str  # "temporary", "result" or "input" (one that is given up to the program)
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
        kinds = [self.series(kind) for kind in ("temporary", "result", "input")]
        return self.arena_bytes + max(map(sum, zip(*kinds, strict=True)), default=0)


def lifetimes(plan: Plan, device: str = "cpu") -> Lifetimes:
    """The lifetimes of a plan's buffers; symbols count with their likely sizes."""
    turns = turns_of(plan.steps)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, steps in enumerate(turns):
        for name in sorted({name for step in steps for name in touched(step)}):
            first.setdefault(name, number)
            last[name] = number
    leaving = output_buffers(plan.program)
    items = []
    for name, buffer in plan.program.buffers.items():
        if name in plan.places or not _is_counted(buffer, plan, first):
            continue
        stays = name in leaving or (buffer.role == "input" and not is_forgotten_early(buffer))
        ends = len(turns) if stays else last.get(name, 0)
        begins = 0 if buffer.role == "input" else first[name]
        size = buffer_bytes(buffer, plan.program.hints, device)
        items.append(Lifetime(name, _kind(buffer, leaving), size, begins, ends))
    return Lifetimes(
        tuple(_label(steps) for steps in turns),
        _arena(plan.arena_bytes, device),
        tuple(items),
        tuple(o.buffer if isinstance(o, View) else None for o in plan.program.outputs),
        tuple(i if i in plan.program.buffers else None for i in plan.program.inputs),
    )


def _is_counted(buffer: Buffer, plan: Plan, first: Mapping[str, int]) -> bool:
    """Its memory comes or goes with the program: made by it, or given up to it."""
    if buffer.role == "input":
        return buffer.name in plan.program.given_up
    return buffer.role != "constant" and buffer.name in first


def turns_of(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps as the host runs them: kernels in a row together, each call by itself."""
    turns: list[list[Step]] = []
    for step in steps:
        if turns and not isinstance(step, Extern) and not isinstance(turns[-1][-1], Extern):
            turns[-1].append(step)
        else:
            turns.append([step])
    return turns


def _label(steps: Sequence[Step]) -> str:
    names = [step.op if isinstance(step, Extern) else step.name for step in steps]
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"


def _kind(buffer: Buffer, leaving: set[str]) -> str:
    if buffer.role == "input":
        return "input"
    return "result" if buffer.name in leaving else "temporary"


def _arena(num_bytes: int, device: str) -> int:
    return allocated_bytes(num_bytes + ARENA_SLACK, True, device) if num_bytes else 0


def buffer_bytes(buffer: Buffer, hints: Hints, device: str = "cpu") -> int:
    """What a buffer takes from its allocator."""
    size = value_of(buffer.num_elements, hints) * buffer.dtype.num_bytes
    # What ATen makes comes from PyTorch's own allocator.
    return allocated_bytes(size, buffer.role != "extern" and size >= SMALLEST_POOLED, device)


def value_of(dim: Dim, hints: Hints) -> int:
    """The number that a size stands for, under likely values of its symbols."""
    if isinstance(dim, int):
        return dim
    total = dim.const
    for atoms, factor in dim.terms:
        for atom in atoms:
            factor *= _atom_value(atom, hints)
        total += factor
    return total


def _atom_value(atom: Atom, hints: Hints) -> int:
    if atom.kind in ("div", "mod"):
        a, b = (value_of(part, hints) for part in atom.parts)
        b = max(b, 1)
        return a // b if atom.kind == "div" else a % b
    return hints.get(str(atom.parts[0]), UNKNOWN_SIZE)
