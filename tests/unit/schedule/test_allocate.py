"""The memory of random plans: values survive until they are read, and mistakes are refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfuse.config import ThresholdSettings
from perfuse.decision import library
from perfuse.errors import SpecError
from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType
from perfuse.ir.matmul import Operands
from perfuse.ir.program import (
    Axis,
    Buffer,
    Extern,
    LibraryCall,
    Loop,
    LoopKind,
    Matmul,
    Program,
    View,
)
from perfuse.schedule.allocate import with_memory
from perfuse.schedule.arena import place, touched
from perfuse.schedule.plan import Kernel, Member, Plan, Step
from perfuse.schedule.turns import Allocation, MemorySource, Scratch, Turn
from perfuse.schedule.verify_memory import verify_memory

SIZES = (16, 16, 256, 4096)  # elements of float32: equal ones are frequent
LIMITS = ThresholdSettings(forget_bytes=64, gpu_release_bytes=8192, gpu_scratch_bytes=512)


def loop(out: Buffer, reads: list[Buffer]) -> Loop:
    value = ex.const(1.0, DType.F32)
    for buffer in reads:
        value = ex.apply("add", value, ex.load(buffer.name, 0, DType.F32))
    return Loop(out.name, (Axis("d0", out.shape[0]),), LoopKind.MAP, value, 0)


def call(out: Buffer, reads: list[Buffer]) -> LibraryCall:
    """One that writes into memory of ours, or one that returns its own."""
    views = [View(b.name, b.shape, b.strides) for b in reads]
    if out.kind == "extern":
        return Extern("aten.any", (out.name,), tuple(views), (), "")
    operands = Operands(views[0], views[-1])
    return Matmul(operands, out.name, library("aten.mm.out"), DType.F32, "")


def random_plan(seed: int, *, is_gpu: bool) -> Plan:
    """Steps that each make one buffer of some that were made before, and its memory."""
    rng = random.Random(seed)
    buffers = [Buffer(f"i{k}", DType.F32, (rng.choice(SIZES),), (1,), "input") for k in range(3)]
    steps: list[Step] = []
    for k in range(rng.randrange(1, 14)):
        role = rng.choice(("temp", "temp", "temp", "extern"))
        made = Buffer(f"b{k}", DType.F32, (rng.choice(SIZES),), (1,), role)
        reads = rng.sample(buffers[-5:], rng.randrange(1, 4))
        if role == "extern" or rng.random() < 0.2:
            steps.append(call(made, reads))
        else:
            member = Member(loop(made, reads), "full", k)
            steps.append(Kernel(f"k{k}", member.loop.axes, (member,), frozenset({made.name})))
        buffers.append(made)
    leaving = rng.sample(buffers[3:], rng.randrange(1, len(steps) + 1))[:3]
    outputs = tuple(View(b.name, b.shape, b.strides) for b in leaving)
    nodes = tuple(s.members[0].loop if isinstance(s, Kernel) else s for s in steps)
    donated = tuple(f"i{k}" for k in range(3) if rng.random() < 0.5)
    names = {b.name: b for b in buffers}
    program = Program(("i0", "i1", "i2"), names, nodes, outputs, donated=donated)
    places, arena = place(program, tuple(steps), rng.choice((0, 512)) if is_gpu else 2048)
    plan = Plan(program, tuple(steps), (), places, arena, thresholds=LIMITS)
    return with_memory(plan, is_gpu=is_gpu, scratch=scratch_of(plan, rng) if is_gpu else {})


def scratch_of(plan: Plan, rng: random.Random) -> dict[str, list[Scratch]]:
    sizes = {k.name: [rng.choice((8, 200, 5000)) for _ in range(rng.randrange(3))]
             for k in plan.kernels}  # fmt: skip
    return {
        name: [Scratch(f"w{i}", DType.F32, size) for i, size in enumerate(own)]
        for name, own in sizes.items()
    }


class Machine:
    """Memory as the plan lays it out; each word holds the name of what was written there last."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.words: dict[tuple[str, int], str] = {}
        self.at: dict[str, tuple[str, int]] = {}
        for name in plan.program.inputs:
            self.at[name] = (name, 0)
            self.write(name)

    def make(self, made: Allocation) -> None:
        if made.source is MemorySource.ARENA:
            self.at[made.name] = ("arena", made.offset)
        elif made.of:
            block, start = self.at[made.of]
            self.at[made.name] = (block, start + made.offset)
        else:
            self.at[made.name] = (made.name, 0)

    def words_of(self, name: str, num_bytes: int | None = None) -> Iterator[tuple[str, int]]:
        buffer = self.plan.program.buffers.get(name)
        size = buffer.shape[0] * 4 if buffer is not None else num_bytes
        block, start = self.at[name]
        yield from ((block, at) for at in range(start, start + size, 64))

    def write(self, name: str, num_bytes: int | None = None) -> None:
        self.words |= dict.fromkeys(self.words_of(name, num_bytes), name)

    def check(self, name: str) -> None:
        found = {self.words.get(word) for word in self.words_of(name)}
        assert found == {name}, f"{name} holds {found}"

    def run(self) -> None:
        for turn in self.plan.memory.turns:
            for number, added in zip(turn.numbers, turn.allocated, strict=True):
                for made in added:
                    self.make(made)
                step = self.plan.steps[number]
                for name in step.reads():
                    self.check(name)
                scratch = [a for a in added if a.name not in self.plan.program.buffers]
                for made in scratch:
                    self.write(made.name, made.num_bytes)
                for name in step.reads():  # scratch is written while inputs are read
                    self.check(name)
                for name in touched(step) - set(step.reads()):
                    self.write(name)
            for name in turn.freed:
                self.at.pop(name)
        for view in self.plan.program.outputs:
            self.check(view.buffer)


SEEDS = st.integers(0, 10_000)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SEEDS, st.booleans())
def test_values_survive_until_they_are_read(seed: int, is_gpu: bool) -> None:
    plan = random_plan(seed, is_gpu=is_gpu)
    verify_memory(plan)
    Machine(plan).run()
    assert is_gpu or plan.memory.arena_bytes == plan.arena_bytes


def test_random_plans_use_every_source() -> None:
    plans = [random_plan(seed, is_gpu=seed % 2 == 0) for seed in range(200)]
    assert {a.source for plan in plans for a in plan.memory.allocations()} == set(MemorySource)
    assert any(plan.memory.freed_at_entry for plan in plans)


# -- mistakes --------------------------------------------------------------------------------


def with_turn(plan: Plan, number: int, **changed: object) -> Plan:
    turns = list(plan.memory.turns)
    turns[number] = replace(turns[number], **changed)  # type: ignore[arg-type]
    return replace(plan, memory=replace(plan.memory, turns=tuple(turns)))


def changed_allocations(
    plan: Plan, change: Callable[[Allocation], list[Allocation] | None]
) -> Iterator[Plan]:
    """The plan with one allocation replaced, for each that `change` answers for."""
    for number, turn in enumerate(plan.memory.turns):
        for k, added in enumerate(turn.allocated):
            for j, made in enumerate(added):
                new = change(made)
                if new is not None:
                    row = (*added[:j], *new, *added[j + 1 :])
                    rows = (*turn.allocated[:k], row, *turn.allocated[k + 1 :])
                    yield with_turn(plan, number, allocated=rows)


def is_buffer(plan: Plan, made: Allocation) -> bool:
    return made.name in plan.program.buffers


def never_freed(plan: Plan) -> Iterator[Plan]:
    for number, turn in enumerate(plan.memory.turns):
        for name in turn.freed:
            if not name.startswith("i"):
                yield with_turn(plan, number, freed=tuple(n for n in turn.freed if n != name))


def freed_twice(plan: Plan) -> Iterator[Plan]:
    for number, turn in enumerate(plan.memory.turns):
        if turn.freed:
            yield with_turn(plan, number, freed=(*turn.freed, turn.freed[0]))


def freed_early(plan: Plan) -> Iterator[Plan]:
    """One turn before the last use of it."""
    for number, turn in enumerate(plan.memory.turns[1:], 1):
        used = {name for n in turn.numbers for name in touched(plan.steps[n])}
        own = {a.name for added in turn.allocated for a in added}
        for name in used.intersection(turn.freed) - own:
            late = with_turn(plan, number, freed=tuple(n for n in turn.freed if n != name))
            before = (*plan.memory.turns[number - 1].freed, name)
            yield with_turn(late, number - 1, freed=before)


def freed_result(plan: Plan) -> Iterator[Plan]:
    last = len(plan.memory.turns) - 1
    for view in plan.program.outputs:
        yield with_turn(plan, last, freed=(*plan.memory.turns[last].freed, view.buffer))


def reused_while_alive(plan: Plan) -> Iterator[Plan]:
    """New memory is that of a buffer which the same step reads."""
    reads = {
        name: old
        for step in plan.kernels
        for name in step.stored
        for old in step.reads()
        if old.startswith("b") and old not in plan.places
    }

    def change(made: Allocation) -> list[Allocation] | None:
        if made.source is not MemorySource.NEW or made.name not in reads:
            return None
        return [replace(made, source=MemorySource.REUSED, of=reads[made.name])]

    yield from changed_allocations(plan, change)


def without_memory(plan: Plan) -> Iterator[Plan]:
    yield from changed_allocations(plan, lambda a: [] if is_buffer(plan, a) else None)


def allocated_twice(plan: Plan) -> Iterator[Plan]:
    yield from changed_allocations(plan, lambda a: [a, a])


def moved_in_arena(plan: Plan) -> Iterator[Plan]:
    def change(made: Allocation) -> list[Allocation] | None:
        is_placed = made.source is MemorySource.ARENA and is_buffer(plan, made)
        return [replace(made, offset=made.offset + 64)] if is_placed else None

    yield from changed_allocations(plan, change)


def scratch_over_buffers(plan: Plan) -> Iterator[Plan]:
    def change(made: Allocation) -> list[Allocation] | None:
        is_scratch = made.source is MemorySource.ARENA and not is_buffer(plan, made)
        return [replace(made, offset=0)] if is_scratch and plan.arena_bytes else None

    yield from changed_allocations(plan, change)


def scratch_past_its_end(plan: Plan) -> Iterator[Plan]:
    def change(made: Allocation) -> list[Allocation] | None:
        is_scratch = made.source in (MemorySource.ARENA, MemorySource.PART) and not is_buffer(
            plan, made
        )
        return [replace(made, offset=1 << 20)] if is_scratch else None

    yield from changed_allocations(plan, change)


def call_among_kernels(plan: Plan) -> Iterator[Plan]:
    turns = plan.memory.turns
    for k, (a, b) in enumerate(pairwise(turns)):
        if any(isinstance(plan.steps[n], LibraryCall) for n in (*a.numbers, *b.numbers)):
            both = Turn(a.first, (*a.allocated, *b.allocated), (*a.freed, *b.freed))
            joined = (*turns[:k], both, *turns[k + 2 :])
            yield replace(plan, memory=replace(plan.memory, turns=joined))


def step_left_out(plan: Plan) -> Iterator[Plan]:
    yield replace(plan, memory=replace(plan.memory, turns=plan.memory.turns[1:]))


MISTAKES = {
    never_freed: "is never freed",
    freed_twice: "is freed twice",
    freed_early: "which is freed before",
    freed_result: "the result b\\d+ is freed",
    reused_while_alive: "which is needed later|which has no memory then",
    without_memory: "has no memory|is not the program's to free",
    allocated_twice: "is allocated twice",
    moved_in_arena: "is not at its place",
    scratch_over_buffers: "overlaps the places of buffers",
    scratch_past_its_end: "ends past",
    call_among_kernels: "shares its turn",
    step_left_out: "the turns run the steps",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_refused(mistake: Callable[[Plan], Iterator[Plan]]) -> None:
    plans = (random_plan(seed, is_gpu=seed % 2 == 0) for seed in range(120))
    broken = [each for plan in plans for each in mistake(plan)]
    assert len(broken) > 10
    for plan in broken[:200]:
        with pytest.raises(SpecError, match=MISTAKES[mistake]):
            verify_memory(plan)


def scratch_plan(*sizes: int) -> Plan:
    """One kernel with pieces of scratch."""
    made = random_plan(1, is_gpu=True)
    kernel = made.kernels[0]
    scratch = [Scratch(f"w{i}", DType.F32, size) for i, size in enumerate(sizes)]
    return with_memory(made, is_gpu=True, scratch={kernel.name: scratch})


@pytest.mark.parametrize("sizes", [(8, 8), (2000, 2000)], ids=["arena", "piece"])
def test_overlapping_scratch_is_refused(sizes: tuple[int, ...]) -> None:
    plan = scratch_plan(*sizes)
    verify_memory(plan)
    own = {a.name: a for a in plan.memory.allocations() if "_w" in a.name}
    first, second = own.values()
    moved = changed_allocations(
        plan, lambda a: [replace(a, offset=first.offset)] if a == second else None
    )
    with pytest.raises(SpecError, match="overlaps"):
        verify_memory(next(moved))
