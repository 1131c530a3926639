"""A race among the choices of selected sources, for tuners that race plans of their own.

The first choice is the library's. It runs in any case, as the reference of the gate; it can win
only where the settings select it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from perfuse.autotune.faces import AlgorithmSelector
from perfuse.autotune.quarantine import quarantine
from perfuse.autotune.race import Enter, Gate, Rules, Timer, race
from perfuse.autotune.select import fallen_back
from perfuse.candidates.sources import is_selected, silent_sources
from perfuse.context import Context
from perfuse.decision import Choice, Decision, Refusal, Rival
from perfuse.errors import NoValidChoicesError
from perfuse.ir.program import Matmul
from perfuse.logs import channel
from perfuse.schedule.plan import Plan
from perfuse.selection import is_selecting

# Why choices must not run in this process, found out in workers (`screen.py`).
Screen = Callable[[Sequence[Choice]], Mapping[Choice, Refusal]]


NOTHING_SILENT: Mapping[str, str] = MappingProxyType({})


def race_selected(
    subject: str,
    choices: Sequence[Choice],
    enter: Enter,
    rules: Rules,
    context: Context,
    *,
    gate: Gate | None = None,
    timer: Timer | None = None,
    screen: Screen = lambda choices: {},
    silent: Mapping[str, str] = NOTHING_SILENT,
    guarded: Enter | None = None,
    problem: str = "",
) -> Decision:
    """The winner among selected choices; the library's call, or an error, if none is valid.

    `silent` has the reasons of sources that propose nothing. Choices that were wrong are
    quarantined under the `problem` that they were wrong for.
    """
    held = partial(race, subject, rules=rules, gate=gate, timer=timer, guarded=guarded)
    decisions: list[Decision] = []

    def benchmark(asked: list[Choice]) -> dict[Choice, float]:
        refusals = screen(asked)
        runs = [choices[0], *(c for c in asked if c != choices[0] and c not in refusals)]
        decision = held(runs, enter, deadline=context.tune_until)
        _quarantine_wrong(decision, problem, context)
        decisions.append(_with_refusals(decision, choices, refusals))
        times = {rival.choice: rival.best_us for rival in decision.rivals}
        return {c: (times.get(c) or math.inf) / 1e3 for c in asked}

    allowed = [choice for choice in choices if is_selected(choice, context)]
    found = AlgorithmSelector().lookup(allowed, subject, "", benchmark) if allowed else {}
    finite = {choice: ms for choice, ms in found.items() if math.isfinite(ms)}
    if not finite:
        error = NoValidChoicesError(subject, _reasons(allowed, decisions, context) | dict(silent))
        return fallen_back(subject, choices, error, context)
    decision = replace(decisions[0], reason="; ".join([decisions[0].reason, *_reports(silent)]))
    if decision.chosen in finite:
        return decision
    best = min(finite, key=lambda choice: finite[choice])
    return replace(decision, chosen=best, reason=f"{decision.reason}; ATEN is not selected")


def _quarantine_wrong(decision: Decision, problem: str, context: Context) -> None:
    for rival in decision.rivals:
        if rival.is_wrong:
            quarantine(problem or decision.subject, rival.choice, rival.refusal, context)


def _reports(silent: Mapping[str, str]) -> list[str]:
    return [f"{name} proposes nothing: {why}" for name, why in silent.items()]


def _with_refusals(
    decision: Decision, choices: Sequence[Choice], refusals: Mapping[Choice, Refusal]
) -> Decision:
    """The decision with every choice: raced, refused, or of a source that is not selected."""
    raced = {rival.choice: rival for rival in decision.rivals}
    others = dict.fromkeys(choices, Refusal("its source is not selected")) | dict(refusals)
    rivals = tuple(raced.get(c) or Rival.refused(c, others[c]) for c in choices)
    return replace(decision, rivals=rivals)


def _reasons(
    allowed: Sequence[Choice], decisions: Sequence[Decision], context: Context
) -> dict[str, str]:
    """Why nothing is left: of each candidate, or of each source where there is none."""
    if not allowed:
        return silent_sources(context)
    refused = {r.choice: r.refusal for d in decisions for r in d.rivals if r.refusal}
    return {str(choice): refused.get(choice, "its time is infinite") for choice in allowed}


def require_selected(plan: Plan, context: Context) -> Plan:
    """The same plan; matmuls that are left to ATen although it is not selected are reported.

    Without `autotune_fallback_to_aten`, one is an error.
    """
    if not is_selecting(context.settings):
        return plan
    for step in plan.steps:
        if isinstance(step, Matmul) and not is_selected(step.choice, context):
            error = NoValidChoicesError(f"{step.op} in {step.out}", silent_sources(context))
            if not context.settings.autotune_fallback_to_aten:
                raise error
            context.counters.inc("autotune.left_to_aten")
            channel("tuning").info("ATen computes %s: %s", step.out, error.message)
    return plan
