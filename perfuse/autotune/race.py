"""The race: rivals take turns, and a challenger replaces the default by a margin or not at all.

Turns are interleaved, so that a disturbance hits every rival, and the best turn of each counts.
Before that, a challenger has to run, and to be about as exact as the default where there is a gate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perfuse.decision import Choice, Decision, Rival
from perfuse.errors import KernelTooLarge, PerfuseError

Clock = Callable[[], float]
Run = Callable[[], Any]
Enter = Callable[[Choice], Run]  # builds and loads a rival; what runs it once
Reading = Callable[[], float]
Timer = Callable[[Run], Reading]  # runs once; gives the seconds when asked after the last round
Gate = Callable[[Any, Any], str | None]  # results of the default and of a challenger: a refusal

# Errors of a rival that lacks resources or support. Any other exception is a bug of ours.
CANNOT_RUN = (PerfuseError, RuntimeError, MemoryError)


@dataclass(frozen=True, slots=True)
class Rules:
    """How long a race lasts, and what it takes to win."""

    margin: float  # the winner's time is below this share of the default's
    unseen_s: float = 0.0  # and by this much below, for costs that the race does not see
    budget_s: float = 0.12
    fewest_rounds: int = 3
    most_rounds: int = 60


def race(
    subject: str,
    choices: Sequence[Choice],
    enter: Enter,
    rules: Rules,
    *,
    gate: Gate | None = None,
    timer: Timer | None = None,
    clock: Clock = time.perf_counter,
) -> Decision:
    """Race the choices, interleaved; the first is the default and has to run."""
    runs, refusals = _entered(choices, enter, gate)
    times = _turns(runs, rules, timer or wall_timer(clock), clock)
    default, best = next(iter(times)), min(times, key=lambda choice: min(times[choice]))
    is_faster = min(times[best]) + rules.unseen_s < rules.margin * min(times[default])
    rounds = len(times[default])
    return Decision(
        subject,
        best if is_faster else default,
        tuple(_rival(choice, times, refusals) for choice in choices),
        f"best of {rounds} rounds; a challenger must win by {1 - rules.margin:.0%}",
    )


def _entered(
    choices: Sequence[Choice], enter: Enter, gate: Gate | None
) -> tuple[dict[Choice, Run], dict[Choice, str]]:
    """Those that run, after a first turn each, and why the others do not."""
    runs: dict[Choice, Run] = {}
    refusals: dict[Choice, str] = {}
    expected: Any = None
    for choice in choices:
        try:
            run = enter(choice)
            result = run()
        except CANNOT_RUN as error:
            is_default = choice == choices[0] and not isinstance(error, KernelTooLarge)
            if is_default or len(refusals) + 1 == len(choices):
                raise  # the default has to run, if there is room for it
            refusals[choice] = f"{type(error).__name__}: {error}"
            continue
        refusal = None
        if gate is not None and runs:
            refusal = gate(expected, result)
        elif gate is not None:
            expected = result
        if refusal is None:
            runs[choice] = run
        else:
            refusals[choice] = refusal
    return runs, refusals


def _turns(
    runs: Mapping[Choice, Run], rules: Rules, timer: Timer, clock: Clock
) -> dict[Choice, list[float]]:
    """Seconds of every turn. Readings are taken at the end, so that nothing waits in between."""
    if len(runs) == 1:
        rules = Rules(rules.margin, fewest_rounds=1, most_rounds=1)  # nothing to compare it with
    readings: dict[Choice, list[Reading]] = {choice: [] for choice in runs}
    start, rounds = clock(), 0
    while rounds < rules.fewest_rounds or (
        rounds < rules.most_rounds and clock() - start < rules.budget_s
    ):
        for choice, run in runs.items():
            readings[choice].append(timer(run))
        rounds += 1
    return {choice: [reading() for reading in found] for choice, found in readings.items()}


def _rival(
    choice: Choice, times: Mapping[Choice, Sequence[float]], refusals: Mapping[Choice, str]
) -> Rival:
    if choice in refusals:
        return Rival(choice, refusal=refusals[choice])
    found = [1e6 * seconds for seconds in times[choice]]
    median = statistics.median(found)
    spread = statistics.median(abs(t - median) for t in found)
    best, median, spread = (round(value, 3) for value in (min(found), median, spread))
    return Rival(choice, best, median, spread)


def wall_timer(clock: Clock = time.perf_counter) -> Timer:
    """The time that the host takes for a run."""

    def timed(run: Run) -> Reading:
        start = clock()
        run()
        seconds = clock() - start
        return lambda: seconds

    return timed


# A challenger's error may be this many times the default's: one library sums long rows in a chain.
MOST_ERROR = 2.0


def error_gate(exact: torch.Tensor | None) -> Gate:
    """Challengers have to agree with the default, and to be about as exact. NaN never passes.

    `exact`: the first rows of the result in a wider type, if they are known.
    """

    def refusal(default: torch.Tensor, challenger: torch.Tensor) -> str | None:
        scale = float(default.abs().max()) or 1.0
        if not float((challenger - default).abs().max()) <= 1e-4 * scale:
            return "its result differs"
        if exact is None:
            return None
        errors = [
            float((r[: len(exact)] - exact).square().mean().sqrt()) for r in (default, challenger)
        ]
        if not errors[1] <= MOST_ERROR * errors[0]:
            return f"its error is {errors[1] / errors[0]:.1f} times the default's"
        return None

    return refusal
