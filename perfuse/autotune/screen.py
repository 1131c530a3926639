"""Screening: candidates that are programs run in workers before they may run in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perfuse.autotune.outcome import DANGEROUS, Outcome, failed, timed
from perfuse.autotune.pool import TuningProcessPool, shared_pool
from perfuse.autotune.program_request import ProgramRequest
from perfuse.autotune.quarantine import quarantine, quarantined
from perfuse.autotune.race import CANNOT_RUN
from perfuse.context import Context
from perfuse.decision import Choice, Refusal
from perfuse.schedule.plan import Plan


def screened(
    problem: Any,
    choices: Sequence[Choice],
    plans_of: Callable[[Choice], tuple[Plan, Plan]],
    context: Context,
    pool: TuningProcessPool | None = None,
) -> dict[Choice, Refusal]:
    """Why some choices must not run in this process: quarantined, or failed in a worker.

    `plans_of` gives the placed plan of a choice alone, and the same with guarded memory, which a
    worker runs first. `repr(problem)` identifies the problem.
    """
    known = {c: quarantined(problem, c, context) for c in choices}
    refusals = {c: Refusal(why) for c, why in known.items() if why}
    if not context.settings.autotune_in_subproc:
        return refusals
    outcomes = _outcomes([c for c in choices if c not in refusals], plans_of, context, pool)
    for choice, outcome in outcomes.items():
        if outcome.reason:
            refusals[choice] = outcome.refusal
        if outcome.fate in DANGEROUS:
            quarantine(problem, choice, outcome.reason, context)
    return refusals


def _outcomes(
    choices: Sequence[Choice],
    plans_of: Callable[[Choice], tuple[Plan, Plan]],
    context: Context,
    pool: TuningProcessPool | None,
) -> Mapping[Choice, Outcome]:
    requests: dict[Choice, ProgramRequest] = {}
    outcomes: dict[Choice, Outcome] = {}
    for choice in choices:
        try:
            requests[choice] = ProgramRequest.of(*plans_of(choice), context=context)
        except CANNOT_RUN as error:
            outcomes[choice] = failed(error)
    found = (pool or shared_pool(context.settings)).run(list(requests.values()), context.tune_until)
    return outcomes | {c: timed(o) for c, o in zip(requests, found, strict=True)}
