"""The race: rivals take turns, and a challenger replaces the default by a margin or not at all.

Before the search measures them, a challenger has to run, and to be about as exact as the default
where there is a gate. The best turn of each counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perfuse.autotune.outcome import Fate, failed
from perfuse.autotune.search import Clock as Clock
from perfuse.autotune.search import Reading as Reading
from perfuse.autotune.search import Rules as Rules
from perfuse.autotune.search import Run as Run
from perfuse.autotune.search import Timer as Timer
from perfuse.autotune.search import turns, wall_timer
from perfuse.decision import LATE, Choice, Decision, Refusal, Rival
from perfuse.errors import KernelTooLarge, PerfuseError

Enter = Callable[[Choice], Run]  # builds and loads a rival; what runs it once
Gate = Callable[[Any, Any], str | None]  # results of the default and of a challenger: a refusal

# Errors of a rival that lacks resources or support. Any other exception is a bug in Perfuse.
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
    deadline: float = math.inf,
    guarded: Enter | None = None,
) -> Decision:
    """Race the choices, interleaved; the first is the default and has to run.

    Of those that are not begun by the deadline only the first challenger takes part. `guarded` runs
    a challenger in guarded memory: that result has to pass the gate as well.
    """
    entered = _Entered(gate, guarded)
    for number, choice in enumerate(choices):
        if number > 1 and clock() >= deadline:
            entered.refusals[choice] = LATE
        else:
            entered.add(choice, enter, is_last=len(entered.refusals) + 1 == len(choices))
    rules = within(rules, deadline - clock())
    times = turns(entered.runs, rules, timer or wall_timer(clock), clock)
    default, rounds = next(iter(times)), len(times[next(iter(times))])
    refusals, best = entered.refusals, _winner(times, rules)
    while best != default and (why := entered.refusal_now(best)):
        refusals[best] = Refusal(f"{Fate.WRONG}: after it was timed: {why}", is_wrong=True)
        del times[best]
        best = _winner(times, rules)
    return Decision(
        subject,
        best,
        tuple(rival_of(choice, times, refusals) for choice in choices),
        f"best of {rounds} rounds; a challenger must win by {1 - rules.margin:.0%}",
    )


def within(rules: Rules, seconds: float) -> Rules:
    """The rules for a race of at most some seconds; one round, where there are none."""
    fewest = rules.fewest_rounds if seconds > 0 else 1
    return replace(rules, budget_s=max(0.0, min(rules.budget_s, seconds)), fewest_rounds=fewest)


def _winner(times: Mapping[Choice, Sequence[float]], rules: Rules) -> Choice:
    default, best = next(iter(times)), min(times, key=lambda choice: min(times[choice]))
    is_faster = min(times[best]) + rules.unseen_s < rules.margin * min(times[default])
    return best if is_faster else default


class _Entered:
    """Those that run, after a first turn each, and why the others do not."""

    def __init__(self, gate: Gate | None, guarded: Enter | None) -> None:
        self._gate, self._guarded = gate, guarded
        self._expected: Any = None  # the result of the default
        self.runs: dict[Choice, Run] = {}
        self.refusals: dict[Choice, Refusal] = {}

    def add(self, choice: Choice, enter: Enter, *, is_last: bool) -> None:
        """Build, run and check a choice; an error, if the default cannot run or nothing can."""
        is_default = not self.runs and not self.refusals
        try:
            # In guarded memory first: elsewhere a stray write damages this process.
            results = [self._guarded(choice)()] if self.runs and self._guarded is not None else []
            run = enter(choice)
            results.append(run())
        except CANNOT_RUN as error:
            if (is_default and not isinstance(error, KernelTooLarge)) or is_last:
                raise  # the default has to run, if there is room for it
            outcome = failed(error)
            is_wrong = outcome.refusal.is_wrong
            self.refusals[choice] = outcome.refusal if is_wrong else Refusal(outcome.detail)
            return
        if not self.runs:
            self._expected = results[0] if self._gate is not None else None
        elif why := next(filter(None, map(self.refusal, results)), None):
            self.refusals[choice] = Refusal(why)
            return
        self.runs[choice] = run

    def refusal(self, result: Any) -> str | None:
        """Why a result is not as right as the default's."""
        return None if self._gate is None else self._gate(self._expected, result)

    def refusal_now(self, choice: Choice) -> str | None:
        """Why a choice that was right before it was timed no longer is."""
        return None if self._gate is None else self.refusal(self.runs[choice]())


def rival_of(
    choice: Choice, times: Mapping[Choice, Sequence[float]], refusals: Mapping[Choice, Refusal]
) -> Rival:
    """A choice with its times in microseconds, or the reason why it has none."""
    if choice in refusals:
        return Rival.refused(choice, refusals[choice])
    found = [1e6 * seconds for seconds in times[choice]]
    median = statistics.median(found)
    spread = statistics.median(abs(t - median) for t in found)
    best, median, spread = (round(value, 3) for value in (min(found), median, spread))
    return Rival(choice, best, median, spread)


def with_late(decision: Decision, candidates: Sequence[Choice]) -> Decision:
    """The decision with every candidate; those that did not take part had no time for it."""
    raced = {rival.choice: rival for rival in decision.rivals}
    late = tuple(raced.get(c) or Rival.refused(c, LATE) for c in candidates)
    return replace(decision, rivals=late)
