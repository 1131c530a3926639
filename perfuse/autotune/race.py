"""The race: rivals take turns, and a challenger replaces the default by a margin or not at all.

Before the search measures them, a challenger has to run, and to be about as exact as the default
where there is a gate. The best turn of each counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from perfuse.autotune.search import Clock as Clock
from perfuse.autotune.search import Reading as Reading
from perfuse.autotune.search import Rules as Rules
from perfuse.autotune.search import Run as Run
from perfuse.autotune.search import Timer as Timer
from perfuse.autotune.search import turns, wall_timer
from perfuse.decision import Choice, Decision, Rival
from perfuse.errors import KernelTooLarge, PerfuseError

Enter = Callable[[Choice], Run]  # builds and loads a rival; what runs it once
Gate = Callable[[Any, Any], str | None]  # results of the default and of a challenger: a refusal

# Errors of a rival that lacks resources or support. Any other exception is a bug of ours.
CANNOT_RUN = (PerfuseError, RuntimeError, MemoryError)


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
    times = turns(runs, rules, timer or wall_timer(clock), clock)
    default, best = next(iter(times)), min(times, key=lambda choice: min(times[choice]))
    is_faster = min(times[best]) + rules.unseen_s < rules.margin * min(times[default])
    rounds = len(times[default])
    return Decision(
        subject,
        best if is_faster else default,
        tuple(rival_of(choice, times, refusals) for choice in choices),
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


def rival_of(
    choice: Choice, times: Mapping[Choice, Sequence[float]], refusals: Mapping[Choice, str]
) -> Rival:
    """A choice with its times in microseconds, or the reason why it has none."""
    if choice in refusals:
        return Rival(choice, refusal=refusals[choice])
    found = [1e6 * seconds for seconds in times[choice]]
    median = statistics.median(found)
    spread = statistics.median(abs(t - median) for t in found)
    best, median, spread = (round(value, 3) for value in (min(found), median, spread))
    return Rival(choice, best, median, spread)


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
