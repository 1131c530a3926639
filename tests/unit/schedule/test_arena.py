"""The arena: buffers that live at the same time lie apart, for any lifetimes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from perfuse.ir.dtype import DType
from perfuse.ir.program import Buffer, Extern, Program, View
from perfuse.schedule.arena import ALIGNMENT, num_bytes, place

NUM_STEPS = 8


@dataclass(frozen=True)
class Life:
    """A buffer of so many bytes, written at `first` and last read at `last`."""

    size: int
    first: int
    last: int

    def meets(self, other: Life) -> bool:
        return self.first <= other.last and other.first <= self.last


STEPS = st.integers(0, NUM_STEPS - 1)
LIVES = st.builds(
    lambda size, a, b: Life(size, min(a, b), max(a, b)), st.integers(1, 300), STEPS, STEPS
)


def program_of(lives: list[Life]) -> Program:
    """Calls that write and read the buffers b0, b1, ... where their lives say so."""
    buffers = {f"b{i}": Buffer(f"b{i}", DType.U8, (x.size,), (1,)) for i, x in enumerate(lives)}
    nodes = []
    for step in range(NUM_STEPS):
        outs = tuple(f"b{i}" for i, life in enumerate(lives) if life.first == step)
        read = [f"b{i}" for i, life in enumerate(lives) if life.last == step]
        views = tuple(View(name, buffers[name].shape, (1,)) for name in read)
        nodes.append(Extern("aten.anything", outs, views, (), "a test"))
    return Program((), buffers, tuple(nodes), ())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(LIVES, max_size=9))
def test_live_buffers_never_overlap(lives: list[Life]) -> None:
    program = program_of(lives)
    places, arena = place(program, program.nodes)
    spans = [(places[f"b{i}"], places[f"b{i}"] + life.size) for i, life in enumerate(lives)]
    for i, (low, high) in enumerate(spans):
        assert low % ALIGNMENT == 0 and high <= arena
        for j, (other_low, other_high) in enumerate(spans[:i]):
            is_apart = high <= other_low or other_high <= low
            assert is_apart or not lives[i].meets(lives[j]), (lives[i], lives[j], places)


def test_memory_is_used_again() -> None:
    lives = [Life(256, i, i + 1) for i in range(NUM_STEPS - 1)]
    program = program_of(lives)
    assert place(program, program.nodes)[1] == 2 * 256


def test_results_and_arguments_have_no_place() -> None:
    program = program_of([Life(64, 0, 1), Life(64, 0, 1), Life(64, 0, 1)])
    given_one = Buffer("b1", DType.U8, (64,), (1,), kind="input")
    buffers = {**program.buffers, "b1": given_one}
    leaving = Program((), buffers, program.nodes, (View("b0", (64,), (1,)),))
    assert list(place(leaving, leaving.nodes)[0]) == ["b2"]


def test_what_a_collective_may_still_read_has_no_place() -> None:
    program = program_of([Life(64, 0, 1), Life(64, 2, 3)])
    late = replace(program.nodes[1], op="_c10d_functional.all_reduce.default")
    nodes = (program.nodes[0], late, *program.nodes[2:])
    assert list(place(program, nodes)[0]) == ["b1"]


def test_bytes_count_the_gaps_between_strides() -> None:
    assert num_bytes(Buffer("b", DType.F32, (3, 2), (10, 1))) == 4 * 22
