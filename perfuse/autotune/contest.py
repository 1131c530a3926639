"""A contest: candidates of one problem are verified, timed together, and verified again.

It runs in this process, or as a request in a worker: there each candidate is first tried alone, so
that the final round holds only those that are right and harmless.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from perfuse.autotune.outcome import DANGEROUS, LATE, Fate, Outcome, failed
from perfuse.autotune.pool import TuningProcessPool
from perfuse.autotune.race import CANNOT_RUN
from perfuse.autotune.search import Clock, Rules, Timer, estimates, turns, wall_timer
from perfuse.autotune.verify_candidate import Judge, Reference, Trial, WrongResult
from perfuse.candidates.request import BenchmarkRequest, RandomTensor, Run
from perfuse.runtime.measure import event_timer

# Two long rounds would decide less than five; more than these never did (tests/unit/autotune).
RULES = Rules(margin=1.0, budget_s=2.0, fewest_rounds=5, most_rounds=150, band=0.02)
ALONE = replace(RULES, fewest_rounds=3, most_rounds=3)
# Slower than the fastest by this, when tried alone, is surely slower when raced: times of separate
# runs differ by half on a busy machine.
_NEAR = 2.0

Advance = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Contest:
    """The operands of a problem, its reference, and how its candidates are timed."""

    operands: tuple[RandomTensor, ...]
    result: RandomTensor
    reference: Reference
    flush_bytes: int = 0  # the size of the last-level cache, which is emptied before each turn


@dataclass(slots=True)
class ContestResult:
    """Times in seconds of those that ran, and the outcomes of the others, by number."""

    times: dict[int, list[float]] = field(default_factory=dict)
    failures: dict[int, Outcome] = field(default_factory=dict)

    @property
    def dangerous(self) -> Mapping[int, Outcome]:
        """Those that must not be run again."""
        return {n: outcome for n, outcome in self.failures.items() if outcome.fate in DANGEROUS}

    def seconds(self, number: int) -> float:
        """The estimate of a time; infinity where there is none."""
        found = self.times.get(number)
        return estimates({number: found})[number].seconds if found else math.inf


def contest_here(
    contest: Contest,
    requests: Sequence[BenchmarkRequest],
    rules: Rules = RULES,
    deadline: float = math.inf,
    advance: Advance = lambda: None,
    clock: Clock = time.perf_counter,
) -> ContestResult:
    """Verify and time candidates in this process; those not begun by the deadline are not run."""
    measured, trials = ContestResult(), dict[int, Trial]()
    judge = Judge.of(contest.operands, contest.reference)
    for number, request in enumerate(requests):
        if clock() >= deadline and trials:
            measured.failures[number] = LATE
            continue
        with _recorded(measured, number):
            trial = Trial(request, contest.result, judge)
            trial.verify()
            trial.verify()  # a result that is right only the first time is wrong
            trials[number] = trial
        advance()
    if trials:
        rules = replace(rules, budget_s=min(rules.budget_s, max(0.0, deadline - clock())))
        runs = {n: _recording(measured, n, trial.run) for n, trial in trials.items()}
        measured.times = turns(runs, rules, timer_of(contest), clock)
    for number, trial in trials.items():
        if number in measured.failures:
            del measured.times[number]
            continue
        with _recorded(measured, number):
            trial.verify()
    return measured


@contextmanager
def _recorded(measured: ContestResult, number: int) -> Iterator[None]:
    """A context in which an error is the failure of one candidate, which then has no time."""
    try:
        yield
    except (WrongResult, *CANNOT_RUN) as error:
        measured.failures[number] = failed(error)
        measured.times.pop(number, None)


def _recording(measured: ContestResult, number: int, run: Run) -> Run:
    """A run that fails at most once: what is timed further is nothing, and does not count."""

    def recorded() -> None:
        if number not in measured.failures:
            with _recorded(measured, number):
                run()

    return recorded


def timer_of(contest: Contest) -> Timer:
    """The clock of the device that holds the result, with its caches emptied before each run."""
    device = torch.device(contest.result.device)
    if device.type == "cuda":
        return event_timer(device, contest.flush_bytes or None)
    if not contest.flush_bytes:
        return wall_timer()
    flushed = torch.empty(contest.flush_bytes, dtype=torch.uint8)
    return wall_timer(prepare=flushed.zero_)


@dataclass(frozen=True, slots=True)
class ContestRequest:
    """A contest that a worker holds; its answer is plain data."""

    contest: Contest
    requests: tuple[BenchmarkRequest, ...]
    rules: Rules
    num_threads: int = field(default_factory=torch.get_num_threads)
    precision: str = field(default_factory=torch.get_float32_matmul_precision)

    def answer(self) -> Any:
        """Hold it under the parent's settings of PyTorch."""
        torch.set_num_threads(self.num_threads)
        torch.set_float32_matmul_precision(self.precision)
        measured = contest_here(self.contest, self.requests, self.rules)
        wrong = [o for o in measured.failures.values() if o.fate is Fate.WRONG]
        if wrong and len(self.requests) == 1:
            raise WrongResult(wrong[0].detail)
        failures = [[n, str(o.fate), o.detail] for n, o in measured.failures.items()]
        return {"times": [[n, found] for n, found in measured.times.items()], "failures": failures}


def contest_in_workers(
    contest: Contest,
    requests: Sequence[BenchmarkRequest],
    pool: TuningProcessPool,
    rules: Rules = RULES,
    deadline: float = math.inf,
    advance: Advance = lambda: None,
    clock: Clock = time.perf_counter,
) -> ContestResult:
    """Verify and time candidates in workers: each alone, then the near ones together."""
    alone = [ContestRequest(contest, (request,), ALONE) for request in requests]
    measured = ContestResult()
    for number, outcome in enumerate(pool.run(alone, deadline, clock, advance)):
        _add(measured, outcome, [number])
    fastest = {number: min(found) for number, found in measured.times.items()}
    best = min(fastest.values(), default=math.inf)
    near = [number for number, seconds in fastest.items() if seconds <= _NEAR * best]
    if len(near) > 1 and clock() < deadline:
        budget_s = min(rules.budget_s, deadline - clock())
        final = ContestRequest(
            contest, tuple(requests[n] for n in near), replace(rules, budget_s=budget_s)
        )
        (outcome,) = pool.run([final])
        if outcome.fate is Fate.MEASURED:  # else their times alone stand
            _add(measured, outcome, near)
        if measured.dangerous.keys() & set(near):
            pool.terminate()  # what was wrong so late may have damaged the worker's memory
    return measured


def _add(measured: ContestResult, outcome: Outcome, numbers: Sequence[int]) -> None:
    """Enter what a worker answered about the candidates of these numbers."""
    if outcome.fate is not Fate.MEASURED:
        measured.failures.update(dict.fromkeys(numbers, outcome))
        return
    try:
        times = {numbers[n]: list(map(float, found)) for n, found in outcome.value["times"]}
        failures = {numbers[n]: Outcome(Fate(f), detail=d) for n, f, d in outcome.value["failures"]}
    except (TypeError, ValueError, LookupError) as error:
        malformed = Outcome(Fate.MALFORMED, detail=f"{type(error).__name__}: {error}")
        measured.failures.update(dict.fromkeys(numbers, malformed))
        return
    measured.times.update(times)
    measured.failures.update(failures)
    for number in failures:
        measured.times.pop(number, None)
