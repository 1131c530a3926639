"""`select`: the fastest valid candidate for a matmul, of all that the selected sources propose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from perfuse.autotune.compile_together import compile_together, num_compile_threads
from perfuse.autotune.contest import (
    RULES,
    Contest,
    ContestResult,
    contest_here,
    contest_in_workers,
)
from perfuse.autotune.faces import AlgorithmSelector
from perfuse.autotune.outcome import Outcome, failed
from perfuse.autotune.pool import shared_pool
from perfuse.autotune.progress import TuningProgress
from perfuse.autotune.quarantine import quarantine, quarantined
from perfuse.autotune.race import CANNOT_RUN, rival_of
from perfuse.autotune.search import first_within
from perfuse.autotune.stored import stored_or_measured
from perfuse.candidates.request import BenchmarkRequest
from perfuse.candidates.source import Source
from perfuse.candidates.sources import Offers, offers_for
from perfuse.context import Context
from perfuse.decision import Choice, Decision, Question, Refusal, Rival
from perfuse.errors import NoValidChoicesError
from perfuse.torch_compat.state import disable_dispatch_modes, disabled_autocast

BAND = RULES.band or 0.0


@dataclass(frozen=True, slots=True)
class Selection:
    """A problem with what its candidates are measured on, and the choice to fall back to."""

    problem: Any  # its text names it, its repr identifies it
    contest: Contest
    fallback: Choice  # the library's own call
    question: Callable[[Sequence[Choice]], Question]  # which of some choices is the fastest


def select(selection: Selection, context: Context) -> Decision:
    """The stored decision on a problem, or a new one; the library's call if that is allowed."""
    offers = offers_for(selection.problem, context)
    choices = tuple(offers.choices)
    subject = str(selection.problem)

    def measure() -> Decision:
        with disable_dispatch_modes(), disabled_autocast():
            return _decided(selection, offers, context)

    counter = "autotune.matmuls_measured"
    try:
        if not choices:
            raise NoValidChoicesError(subject, offers.silent)
        question = selection.question(choices)
        return stored_or_measured(question, subject, context, measure, counter)
    except NoValidChoicesError as error:
        return fallen_back(subject, (selection.fallback, *choices), error, context)


def fallen_back(
    subject: str, choices: Sequence[Choice], error: NoValidChoicesError, context: Context
) -> Decision:
    """The decision for the first choice, the library's, where none is valid, if that is allowed."""
    if not context.settings.autotune_fallback_to_aten:
        raise error
    context.counters.inc("autotune.fallback_to_aten")
    rivals = tuple(
        Rival(choice, refusal=error.reasons.get(str(choice), "not measured"))
        for choice in dict.fromkeys(choices)
    )
    return Decision(subject, choices[0], rivals, f"ATen, since {error.message}")


def _decided(selection: Selection, offers: Offers, context: Context) -> Decision:
    """Measure what may be run, and choose; NoValidChoicesError if nothing can be."""
    subject = str(selection.problem)
    refusals = {
        choice: Refusal(why)
        for choice in offers.choices
        if (why := quarantined(selection.problem, choice, context))
    }
    times: dict[Choice, list[float]] = {}

    def benchmark(choices: list[Choice]) -> dict[Choice, float]:
        measured = _measured(selection, {c: offers.choices[c] for c in choices}, context)
        for number, outcome in measured.failures.items():
            refusals[choices[number]] = outcome.refusal
        for number, outcome in measured.dangerous.items():
            quarantine(selection.problem, choices[number], outcome.reason, context)
        times.update({choices[number]: found for number, found in measured.times.items()})
        return {choice: 1e3 * measured.seconds(n) for n, choice in enumerate(choices)}

    inputs = repr(selection.problem)
    allowed = [choice for choice in offers.choices if choice not in refusals]
    found = AlgorithmSelector().lookup(allowed, subject, inputs, benchmark) if allowed else {}
    finite = {choice: ms for choice, ms in found.items() if math.isfinite(ms)}
    if not finite:
        infinite = dict.fromkeys(map(str, allowed), "its time is infinite")
        refused = {str(choice): refusal.text for choice, refusal in refusals.items()}
        raise NoValidChoicesError(subject, {**offers.silent, **infinite, **refused})
    skipped = [c for c in offers.choices if c not in times and c not in refusals]
    refusals |= dict.fromkeys(skipped, Refusal("not measured"))
    reason = f"ties within {BAND:.0%} go to the first proposed"
    return Decision(
        subject,
        first_within(finite, BAND),
        tuple(rival_of(choice, times, refusals) for choice in offers.choices),
        f"{reason}; {offers}" if offers.silent else reason,
    )


def _measured(
    selection: Selection, sources: Mapping[Choice, Source], context: Context
) -> ContestResult:
    """Build the candidates in parallel and hold their contest, here or in workers."""
    requests, failures = _requests(selection.problem, sources, context)
    numbers, settings, deadline = list(requests), context.settings, context.tune_until
    with TuningProgress(str(selection.problem), len(requests)) as progress:
        asked = (selection.contest, list(requests.values()))
        if settings.autotune_in_subproc:
            measured = contest_in_workers(
                *asked,
                shared_pool(settings),
                RULES,
                deadline,
                progress.advance,
            )
        else:
            measured = contest_here(*asked, RULES, deadline, progress.advance)
    times = {numbers[n]: found for n, found in measured.times.items()}
    failures |= {numbers[n]: outcome for n, outcome in measured.failures.items()}
    return ContestResult(times, failures)


def _requests(
    problem: Any, sources: Mapping[Choice, Source], context: Context
) -> tuple[dict[int, BenchmarkRequest], dict[int, Outcome]]:
    """The requests of those that compile, and the errors of the others, by number."""
    builds = [
        (choice, partial(source.build, problem, choice, context))
        for choice, source in sources.items()
        if source.build is not None
    ]
    num_threads = num_compile_threads(context, len(builds))
    errors = compile_together(builds, num_threads, context.counters, context.tune_until)
    requests: dict[int, BenchmarkRequest] = {}
    failures: dict[int, Outcome] = {}
    for number, (choice, source) in enumerate(sources.items()):
        try:
            if choice in errors:
                raise errors[choice]
            if source.request is None:
                raise NotImplementedError(f"{choice} cannot be measured")
            requests[number] = source.request(problem, choice, context)
        except CANNOT_RUN as error:
            failures[number] = failed(error)
    return requests, failures
