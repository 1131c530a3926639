"""`GuardRow`: what a host program that checks its memory says of each buffer of the arena."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from perfuse.ir.dtype import to_torch
from perfuse.schedule.memory import num_bytes, touched
from perfuse.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class GuardRow:
    """A buffer's bytes in the arena, and the turns of the host program in which they are its."""

    name: str
    offset: int
    num_bytes: int
    dtype: str
    first: int
    last: int


def guard_rows(plan: Plan, turns: Mapping[int, int]) -> Iterator[GuardRow]:
    """The rows of a plan; `turns` says in which turn of the host each step runs."""
    used: dict[str, list[int]] = {}
    for number, step in enumerate(plan.steps):
        for name in touched(step):
            used.setdefault(plan.over.get(name, name), []).append(turns[number])
    for name in sorted(plan.places.keys() & used.keys()):
        buffer = plan.program.buffers[name]
        size = num_bytes(buffer)
        assert size is not None, "arena buffers have known sizes"
        kind, when = str(to_torch(buffer.dtype)), used[name]
        yield GuardRow(name, plan.places[name], size, kind, min(when), max(when))
