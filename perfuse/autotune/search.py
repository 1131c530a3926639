"""The search: rivals take turns until it is clear which one wins, or time is up.

Turns are interleaved, so that a disturbance hits every rival. With a tie band, the winner is the
first proposed rival that none beats by more than the band; rivals that can neither win nor decide
who does are left out of further rounds. So two searches on the same machine agree, unless a rival
is just at the edge of the band.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Clock = Callable[[], float]
Run = Callable[[], Any]
Reading = Callable[[], float]
Timer = Callable[[Run], Reading]  # runs once; gives the seconds when asked after the round

# Standard errors on each side of an estimate, beyond which the true time is not expected.
_SURE = 2.5
# Readings further than this many deviations from the median are disturbances.
_OUTLIER = 3.5
_DEVIATION = 1.4826  # of a normal distribution: standard deviations in a median distance


@dataclass(frozen=True, slots=True)
class Rules:
    """How long a race lasts, and what it takes to win."""

    margin: float  # the winner's time is below this share of the default's
    unseen_s: float = 0.0  # and by this much below, for costs that the race does not see
    budget_s: float = 0.12
    fewest_rounds: int = 3
    most_rounds: int = 60
    band: float | None = None  # ties: within this share of each other, the first proposed wins
    # Once the budget is spent, fewer rounds suffice where the best is this many times as fast.
    clear: float = math.inf


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time of a rival, and how far from it the true one may be."""

    seconds: float
    error: float

    @property
    def low(self) -> float:
        return self.seconds - self.error

    @property
    def high(self) -> float:
        return self.seconds + self.error


def turns(
    runs: Mapping[T, Run], rules: Rules, timer: Timer, clock: Clock = time.perf_counter
) -> dict[T, list[float]]:
    """Seconds of every turn of every rival."""
    if len(runs) == 1 and rules.band is None:
        rules = Rules(rules.margin, fewest_rounds=1, most_rounds=1)  # nothing to compare it with
    times: dict[T, list[float]] = {rival: [] for rival in runs}
    readings: dict[T, list[Reading]] = {rival: [] for rival in runs}
    remaining, start, rounds = list(runs), clock(), 0
    while remaining and (
        rounds < rules.fewest_rounds
        or (rounds < rules.most_rounds and clock() - start < rules.budget_s)
    ):
        for rival in remaining:
            readings[rival].append(timer(runs[rival]))
        rounds += 1
        if rules.band is not None:
            _read(readings, times)
            if rounds >= rules.fewest_rounds:
                remaining = undecided(estimates(times), rules.band)
        elif rules.clear < math.inf and clock() - start >= rules.budget_s:
            _read(readings, times)
            if _is_clear(times, rules.clear):
                break
    _read(readings, times)  # in plain races only here, so that nothing waits in between
    return times


def _is_clear(times: Mapping[T, Sequence[float]], factor: float) -> bool:
    """Whether the best rival is so much faster than every other."""
    first, *others = sorted(map(min, times.values()))
    return all(factor * first <= other for other in others)


def _read(readings: Mapping[T, list[Reading]], times: Mapping[T, list[float]]) -> None:
    for rival, waiting in readings.items():
        times[rival].extend(reading() for reading in waiting)
        waiting.clear()


def estimates(times: Mapping[T, Sequence[float]]) -> dict[T, Estimate]:
    """The time of each rival without disturbances, and its error.

    Rounds are shared, so noise is too: a rival is not surer than most, however equal its times.
    """
    spreads = [_spread(found) / statistics.median(found) for found in times.values() if any(found)]
    typical = statistics.median(spreads) if spreads else 0.0
    return {rival: _estimate(found, typical) for rival, found in times.items()}


def _spread(times: Sequence[float]) -> float:
    median = statistics.median(times)
    return _DEVIATION * statistics.median(abs(t - median) for t in times)


def _estimate(times: Sequence[float], typical: float) -> Estimate:
    median = statistics.median(times)
    deviation = max(_spread(times), typical * median)
    kept = [t for t in times if abs(t - median) <= _OUTLIER * deviation] or [median]
    return Estimate(statistics.fmean(kept), _SURE * deviation / math.sqrt(len(kept)))


def undecided(found: Mapping[T, Estimate], band: float) -> list[T]:
    """The rivals to measure further, in order; none where it is sure which one wins."""
    rivals = list(found)
    least_high = min(estimate.high for estimate in found.values())
    # Surely beaten by more than the band: it cannot win, nor is it the fastest.
    near = [r for r in rivals if found[r].low <= (1 + band) * least_high]
    leader = near[0]
    if all(found[leader].high <= (1 + band) * found[r].low for r in near if r != leader):
        return []
    # A later rival matters if it may beat the leader by more than the band.
    return [r for r in near if r == leader or (1 + band) * found[r].low <= found[leader].high]


def first_within(seconds: Mapping[T, float], band: float) -> T:
    """The first rival that none beats by more than the band."""
    best = min(seconds.values())
    return next(rival for rival, time_s in seconds.items() if time_s <= (1 + band) * best)


def wall_timer(clock: Clock = time.perf_counter, prepare: Run = lambda: None) -> Timer:
    """The time that the host takes for a run; `prepare` runs before, and is not measured."""

    def timed(run: Run) -> Reading:
        prepare()
        start = clock()
        run()
        seconds = clock() - start
        return lambda: seconds

    return timed
