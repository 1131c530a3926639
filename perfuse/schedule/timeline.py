"""`Timeline`: the memory of a training step over its turns, forward and then backward.

It counts what the step itself allocates: results, saved values, temporaries, gradients,
and the workspace of libraries.
Inputs, parameters and the optimizer's state exist before and after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from perfuse.schedule.lifetimes import HeldAs, Lifetime, Lifetimes, held
from perfuse.torch_compat.graphs import GraphKind


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes held while one turn runs, by what they are held for."""

    half: GraphKind
    label: str
    results: int  # of the forward, which the caller may hold until the end
    saved: int  # by the forward for the backward alone
    gradients: int  # those coming in, and those made so far
    temporaries: int
    workspace: int = 0  # of libraries, and of kernels beside the program's buffers

    @property
    def total(self) -> int:
        return self.results + self.saved + self.gradients + self.temporaries + self.workspace


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step's memory, moment by moment."""

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> int:
        return max((m.total for m in self.moments), default=0)

    @property
    def peak_moment(self) -> Moment | None:
        return max(self.moments, key=lambda m: m.total, default=None)

    @property
    def saved_bytes(self) -> int:
        """The bytes that the forward saves for the backward."""
        backward = [m.saved for m in self.moments if m.half is GraphKind.BACKWARD]
        return backward[0] if backward else 0


@dataclass(frozen=True, slots=True)
class Link:
    """A saved value: its place among the forward's outputs and among the backward's inputs."""

    output: int
    input: int


def step_timeline(
    forward: Lifetimes,
    backward: Lifetimes,
    num_results: int,
    links: Sequence[Link],
    keeps_arenas: bool = False,
) -> Timeline:
    """The memory of a step, the first `num_results` outputs of the forward being the caller's.

    Arenas that are kept between calls are there all the time.
    """
    if keeps_arenas:
        both = forward.arena_bytes + backward.arena_bytes
        forward, backward = replace(forward, arena_bytes=both), replace(backward, arena_bytes=both)
    made = {item.buffer: item for item in forward.items if item.kind is HeldAs.RESULT}
    results = {name for name in forward.outputs[:num_results] if name in made}
    saved = _saved_until(forward, backward, links, made.keys() - results)
    inputs = {link.input for link in links}
    before = _forward_moments(forward, made, results)
    return Timeline((*before, *_backward_moments(backward, made, results, saved, inputs)))


def _saved_until(
    forward: Lifetimes, backward: Lifetimes, links: Sequence[Link], names: set[str]
) -> dict[str, int]:
    """For each buffer that is only saved, the last turn of the backward that holds it."""
    ends = {item.buffer: item.last for item in backward.items if item.kind is HeldAs.INPUT}
    until: dict[str, int] = {}
    for link in links:
        name, given = forward.outputs[link.output], backward.inputs[link.input]
        if name in names and given is not None:
            until[name] = max(until.get(name, -1), ends.get(given, backward.num_turns))
    return until


def _forward_moments(
    forward: Lifetimes, made: dict[str, Lifetime], results: set[str]
) -> Iterator[Moment]:
    mine = held((made[name] for name in results), forward.num_turns)
    saved = held((made[name] for name in made.keys() - results), forward.num_turns)
    return _moments(GraphKind.FORWARD, forward, mine, saved, [0] * forward.num_turns)


def _backward_moments(
    backward: Lifetimes,
    made: dict[str, Lifetime],
    results: set[str],
    saved_until: dict[str, int],
    saved_inputs: set[int],
) -> Iterator[Moment]:
    mine = [sum(made[name].num_bytes for name in results)] * backward.num_turns
    kept = [replace(made[name], first=0, last=last) for name, last in saved_until.items()]
    names = {backward.inputs[i] for i in saved_inputs}
    inputs = [i for i in backward.items if i.kind is HeldAs.INPUT and i.buffer not in names]
    results_of_backward = [i for i in backward.items if i.kind is HeldAs.RESULT]
    saved = held(kept, backward.num_turns)
    gradients = held((*inputs, *results_of_backward), backward.num_turns)
    return _moments(GraphKind.BACKWARD, backward, mine, saved, gradients)


def _moments(
    half: GraphKind, plan: Lifetimes, results: list[int], saved: list[int], gradients: list[int]
) -> Iterator[Moment]:
    inner = [plan.arena_bytes + size for size in plan.series(HeldAs.TEMPORARY)]
    parts = zip(results, saved, gradients, inner, plan.series(HeldAs.WORKSPACE), strict=True)
    return (Moment(half, label, *sizes) for label, sizes in zip(plan.labels, parts, strict=True))
