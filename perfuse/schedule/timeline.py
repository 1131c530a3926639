"""`Timeline`: the memory of a training step over its turns, forward and then backward.

It counts what the step itself allocates: results, saved values, temporaries, gradients,
and the workspace of libraries.
Inputs, parameters and the optimizer's state exist before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfuse.schedule.lifetimes import Lifetime, Lifetimes


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes held while one turn runs, by what they are held for."""

    half: str  # "forward" or "backward"
    label: str
    results: int  # of the forward, which the caller may hold until the end
    saved: int  # by the forward for the backward alone
    gradients: int  # those coming in, and those made so far
    temporaries: int
    workspace: int = 0  # of libraries, and of kernels besides the program's buffers

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
        backward = [m.saved for m in self.moments if m.half == "backward"]
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
    made = {item.buffer: item for item in forward.items if item.kind == "result"}
    results = {name for name in forward.outputs[:num_results] if name in made}
    saved = _saved_until(forward, backward, links, made.keys() - results)
    return Timeline(
        (
            *_forward_moments(forward, made, results),
            *_backward_moments(backward, made, results, saved, {link.input for link in links}),
        )
    )


def _saved_until(
    forward: Lifetimes, backward: Lifetimes, links: Sequence[Link], names: set[str]
) -> dict[str, int]:
    """For each buffer that is only saved, the last turn of the backward that holds it."""
    ends = {item.buffer: item.last for item in backward.items if item.kind == "input"}
    until: dict[str, int] = {}
    for link in links:
        name, given = forward.outputs[link.output], backward.inputs[link.input]
        if name in names and given is not None:
            until[name] = max(until.get(name, -1), ends.get(given, backward.num_turns))
    return until


def _forward_moments(
    forward: Lifetimes, made: dict[str, Lifetime], results: set[str]
) -> list[Moment]:
    temporaries, workspace = forward.series("temporary"), forward.series("workspace")
    moments = []
    for turn, label in enumerate(forward.labels):
        alive = [item for item in made.values() if item.first <= turn]
        mine = sum(item.num_bytes for item in alive if item.buffer in results)
        rest = sum(item.num_bytes for item in alive) - mine
        inner = forward.arena_bytes + temporaries[turn]
        moments.append(
            Moment(
                half="forward",
                label=label,
                results=mine,
                saved=rest,
                gradients=0,
                temporaries=inner,
                workspace=workspace[turn],
            )
        )
    return moments


def _backward_moments(
    backward: Lifetimes,
    made: dict[str, Lifetime],
    results: set[str],
    saved: dict[str, int],
    saved_inputs: set[int],
) -> list[Moment]:
    held = sum(made[name].num_bytes for name in results)
    names = {backward.inputs[i] for i in saved_inputs}
    tangents = Lifetimes(
        backward.labels,
        0,
        tuple(i for i in backward.items if i.kind == "input" and i.buffer not in names),
        (),
        (),
    ).series("input")
    kept = _series([(made[name].num_bytes, last) for name, last in saved.items()], backward)
    gradients, temporaries = backward.series("result"), backward.series("temporary")
    workspace = backward.series("workspace")
    return [
        Moment(
            half="backward",
            label=label,
            results=held,
            saved=kept[turn],
            gradients=tangents[turn] + gradients[turn],
            temporaries=backward.arena_bytes + temporaries[turn],
            workspace=workspace[turn],
        )
        for turn, label in enumerate(backward.labels)
    ]


def _series(sizes: Sequence[tuple[int, int]], backward: Lifetimes) -> list[int]:
    """Bytes by turn of what is there from the start until a turn each."""
    changes = [0] * (backward.num_turns + 2)
    for num_bytes, last in sizes:
        changes[min(last, backward.num_turns) + 1] += num_bytes
    total, sums = sum(num_bytes for num_bytes, _ in sizes), []
    for turn in range(backward.num_turns):
        total -= changes[turn]
        sums.append(total)
    return sums
