"""The spec of a MemoryPlan: memory before use, none after it is freed, everything freed once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from perfuse.errors import SpecError
from perfuse.ir.program import ARGUMENTS
from perfuse.schedule.allocate import freed_inputs, leaving_names, seen_by_calls
from perfuse.schedule.arena import first_and_last, num_bytes, touched
from perfuse.schedule.plan import Kernel, Plan
from perfuse.schedule.turns import Allocation, MemorySource

_STAGE = "after schedule"


def verify_memory(plan: Plan) -> None:
    """Raise SpecError at the first mistake in a plan's decision about its memory."""
    _Checked(plan).run()


class _Checked:
    """Runs the plan without its values."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.memory = plan.memory
        self.buffers = plan.program.buffers
        _, self.last_use = first_and_last(map(touched, plan.steps))
        self.leaving = leaving_names(plan)
        self.with_layout = self.leaving | seen_by_calls(plan)
        self.donated = freed_inputs(plan)
        self.made: dict[str, Allocation] = {}
        self.owned: set[str] = set()  # allocated by itself, not part of something larger
        self.reused: set[str] = set()
        self.freed: set[str] = set()

    def run(self) -> None:
        self._check_turns()
        self._free(self.memory.freed_at_entry)
        for turn in self.memory.turns:
            for number, added in zip(turn.numbers, turn.allocated, strict=True):
                for allocation in added:
                    self._make(allocation, number)
                self._check_apart(added)
                self._use(number)
            self._free(turn.freed)
        for allocation in self.memory.at_exit:
            self._make(allocation, len(self.plan.steps))
        self._check_end()

    def _check_turns(self) -> None:
        numbers = [number for turn in self.memory.turns for number in turn.numbers]
        if numbers != list(range(len(self.plan.steps))):
            raise SpecError(f"{_STAGE}: the turns run the steps {numbers}")
        for turn in self.memory.turns:
            steps = [self.plan.steps[number] for number in turn.numbers]
            calls = [step for step in steps if not isinstance(step, Kernel)]
            if calls and len(steps) > 1:
                raise SpecError(f"{_STAGE}: a call shares its turn with other steps: {calls[0]}")

    def _make(self, made: Allocation, number: int) -> None:
        name = made.name
        if name in self.made:
            raise SpecError(f"{_STAGE}: {name} is allocated twice")
        if name in self.buffers and self.buffers[name].kind in ARGUMENTS:
            raise SpecError(f"{_STAGE}: {name} is allocated, but is given to the program")
        if made.source is MemorySource.REUSED:
            self._check_reuse(made, number)
        elif made.source is MemorySource.ARENA:
            self._check_place(made)
        elif made.source is MemorySource.PART:
            self._check_part(made)
        self.made[name] = made
        if made.source not in (MemorySource.ARENA, MemorySource.PART):
            self.owned.add(name)

    def _check_reuse(self, made: Allocation, number: int) -> None:
        new, old = made.name, made.of
        if old not in self.made or old in self.freed | self.reused:
            raise SpecError(f"{_STAGE}: {new} reuses {old}, which has no memory then")
        is_in_place = self.plan.over.get(new) == self._first_owner(old)
        if self.last_use[old] >= number + is_in_place or old in self.leaving:
            raise SpecError(f"{_STAGE}: {new} reuses {old}, which is needed later")
        a, b = self.buffers[self._first_owner(old)], self.buffers[new]
        has_layout = (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides)
        has_size = is_in_place and (a.dtype, a.num_elements) == (b.dtype, b.num_elements)
        has_size |= num_bytes(a) is not None and num_bytes(a) == num_bytes(b)
        if not has_layout and not has_size:
            raise SpecError(f"{_STAGE}: {new} reuses {old}, which has another size")
        if not has_layout and not is_in_place and new in self.with_layout:
            raise SpecError(f"{_STAGE}: {new} reuses {old}, which has another layout")
        self.reused.add(old)

    def _first_owner(self, name: str) -> str:
        while self.made[name].source is MemorySource.REUSED:
            name = self.made[name].of
        return name

    def _check_place(self, made: Allocation) -> None:
        """Those of the plan's buffers are checked against each other in `verify.py`."""
        if made.name in self.buffers:
            if self.plan.places.get(made.name) != made.offset:
                raise SpecError(f"{_STAGE}: {made.name} is not at its place in the arena")
        elif made.offset < self.plan.arena_bytes:
            raise SpecError(f"{_STAGE}: the scratch {made.name} overlaps the places of buffers")
        elif made.num_bytes is None or made.offset + made.num_bytes > self.memory.arena_bytes:
            raise SpecError(f"{_STAGE}: the scratch {made.name} ends past the arena")

    def _check_part(self, made: Allocation) -> None:
        piece = self.made.get(made.of)
        room = None if piece is None or piece.name in self.freed else piece.num_bytes
        if room is None or made.num_bytes is None or made.offset + made.num_bytes > room:
            raise SpecError(f"{_STAGE}: the scratch {made.name} ends past {made.of}")

    def _check_apart(self, added: Iterable[Allocation]) -> None:
        """A kernel's scratch in the arena, or in one piece, does not overlap."""
        inside = [a for a in added if a.source in (MemorySource.ARENA, MemorySource.PART)]
        spans = sorted(
            (a.of, a.offset, a.offset + (a.num_bytes or 0), a.name)
            for a in inside
            if a.name not in self.buffers
        )
        for (of, _, end, name), (other, begin, _, next_name) in pairwise(spans):
            if of == other and begin < end:
                raise SpecError(f"{_STAGE}: the scratch {next_name} overlaps {name}")

    def _use(self, number: int) -> None:
        for name in sorted(touched(self.plan.steps[number])):
            buffer = self.buffers.get(name)
            if name in self.freed:
                raise SpecError(f"{_STAGE}: step {number} uses {name}, which is freed before")
            is_given = buffer is None or buffer.kind in ARGUMENTS
            if name not in self.made and not is_given:
                raise SpecError(f"{_STAGE}: step {number} uses {name}, which has no memory")

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.owned and name not in self.donated:
                raise SpecError(f"{_STAGE}: {name} is freed, but is not the program's to free")
            if name in self.freed:
                raise SpecError(f"{_STAGE}: {name} is freed twice")
            if name in self.leaving:
                raise SpecError(f"{_STAGE}: the result {name} is freed")
            self.freed.add(name)

    def _check_end(self) -> None:
        for name in sorted(self.owned - self.freed - self.leaving):
            raise SpecError(f"{_STAGE}: {name} is never freed")
