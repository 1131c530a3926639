"""Matmuls: which library call is fastest here, for these sizes and strides.

Two libraries come with PyTorch on the CPU and neither wins everywhere, so each distinct matmul is
raced once and the decision kept on disk. A challenger must be about as exact as the default,
judged against float64, and beat it by a margin, so that noise cannot flip a decision. In the modes
that tune more, the candidates are those of all selected sources (`select.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch

from perfuse.autotune.contest import Contest
from perfuse.autotune.contractions import tune_contractions
from perfuse.autotune.library_calls import problem_of as problem_of
from perfuse.autotune.library_calls import with_library_call
from perfuse.autotune.machine import device_kind, library_versions
from perfuse.autotune.problem import LibraryMatmul, MatmulReference
from perfuse.autotune.problem import Problem as Problem
from perfuse.autotune.problem import choices_of as choices_of
from perfuse.autotune.race import MOST_ERROR, Enter, Rules, error_gate, race, within
from perfuse.autotune.select import Selection, select
from perfuse.autotune.sources import ATEN, apply_of, offers_for, selected_sources
from perfuse.autotune.stored import is_consulted, stored_or_measured
from perfuse.autotune.time_limit import seconds_left
from perfuse.cache import keys
from perfuse.context import Context
from perfuse.decision import Choice, Decision, Question
from perfuse.gpu import Platform
from perfuse.ir.matmul import RIVALS
from perfuse.ir.program import Matmul
from perfuse.schedule.plan import Plan
from perfuse.selection import is_selecting
from perfuse.torch_compat.state import disable_dispatch_modes, disabled_autocast

# Enough rounds of short matmuls that noise does not decide: with twelve, mobilebert lost 5 %.
# The race does not see that a challenger's result is new memory, not ours.
RULES = Rules(margin=0.96, unseen_s=1e-5, budget_s=0.12, fewest_rounds=3, most_rounds=60)
_EXACT_ROWS = 64


def tune_matmuls(plan: Plan, context: Context) -> Plan:
    """The plan with each large matmul of a CPU computed as it measured fastest.

    A matmul that templates compute is one question together with the library calls, except where
    a source that is not ours has candidates for it: those are compared with the libraries first.
    """
    if is_selecting(context.settings):  # whatever is compiled: an unknown name is an error
        selected_sources(context.settings.max_autotune_gemm_backends)
    if context.target.gpu is not None:
        return plan
    found = problems_of(plan, context)
    apart = {out for out, problem in found.items() if _is_offered_elsewhere(problem, context)}
    plan, first = tune_library_calls(plan, {out: found[out] for out in apart}, context)
    plan, decided = tune_contractions(plan, context, first)
    rest = {out: problem for out, problem in found.items() if out not in {*apart, *decided}}
    return tune_library_calls(plan, rest, context)[0]


def problems_of(plan: Plan, context: Context) -> dict[str, Problem]:
    """The matmuls among which libraries compete, by the names of their results."""
    if not _is_tuned(context):
        return {}
    # Below this the call itself costs more than any choice saves.
    least = max(1, context.settings.thresholds.tuned_matmul_work)
    matmuls = [step for step in plan.steps if isinstance(step, Matmul)]
    found = {step.out: problem_of(step, plan.program, least) for step in matmuls}
    return {out: problem for out, problem in found.items() if problem is not None}


def _is_offered_elsewhere(problem: Problem, context: Context) -> bool:
    """Whether a selected source of its own measurements has candidates, besides the libraries."""
    offers = offers_for(problem, context).choices if is_selecting(context.settings) else {}
    return any(source is not ATEN for source in offers.values())


def tune_library_calls(
    plan: Plan, problems: Mapping[str, Problem], context: Context
) -> tuple[Plan, Set[str]]:
    """The plan with matmuls by the fastest candidates, and the results that no library computes.

    The largest ones come first: they matter most, if the time for tuning ends.
    """
    if not problems:
        return plan, frozenset()
    distinct = sorted(set(problems.values()), key=lambda p: (-p.work, repr(p)))
    asked = [problem for problem in distinct if _has_candidates(problem, context)]
    decisions: dict[Problem, Decision] = {}
    for number, problem in enumerate(asked):
        share_s = seconds_left(context) / (len(asked) - number)
        decisions[problem] = decide(problem, context, share_s)
    chosen = {out: decisions[p].chosen for out, p in problems.items() if p in decisions}
    others = {out: choice for out, choice in chosen.items() if apply_of(choice) is not None}
    plan = with_library_call(plan, {o: c for o, c in chosen.items() if o not in others})
    plan = replace(plan, decisions=(*plan.decisions, *decisions.values()))
    for matmul in [s for s in plan.steps if isinstance(s, Matmul) and s.out in others]:
        apply = apply_of(others[matmul.out])
        plan = plan if apply is None else apply(plan, matmul, others[matmul.out], context)
    return plan, set(others)


def _has_candidates(problem: Problem, context: Context) -> bool:
    """Whether there is anything to choose from; without, the matmul stays as it is."""
    return not is_selecting(context.settings) or bool(offers_for(problem, context).choices)


def _is_tuned(context: Context) -> bool:
    has_rivals = any(row.is_available() for row in RIVALS)
    return is_selecting(context.settings) or (
        has_rivals and (is_measured(context) or is_consulted(context))
    )


def is_measured(context: Context) -> bool:
    """Whether a matmul without a remembered decision is raced in the modes that select nothing."""
    return context.settings.cpu.tune_matmuls and not context.settings.search_autotune_cache


def question_of(problem: Problem, choices: Sequence[Choice], context: Context) -> Question:
    """The question which of these computes a matmul fastest on this kind of machine."""
    return Question(
        keys.MATMUL.name,
        f"{problem}, float32, strides {problem.a_strides} and {problem.b_strides}, "
        f"threads of PyTorch: {torch.get_num_threads()}",
        tuple(choices),
        device_kind(context.target),
        library_versions(Platform.CPU),
        f"{RULES}, error {MOST_ERROR}",
    )


def decide(problem: Problem, context: Context, share_s: float = math.inf) -> Decision:
    """The remembered decision for a matmul on this kind of machine, or a new one.

    `share_s`: the part of the time for tuning that this one may take in default mode.
    """
    if is_selecting(context.settings):
        return select(selection_of(problem, context), context)
    choices = choices_of(problem)

    def measure() -> Decision:
        with disable_dispatch_modes(), disabled_autocast():
            gate = error_gate(exact_rows(problem))
            rules = within(RULES, share_s)
            enter, deadline = entered(problem), context.tune_until
            return race(str(problem), choices, enter, rules, gate=gate, deadline=deadline)

    return stored_or_measured(
        question_of(problem, choices, context),
        str(problem),
        context,
        measure if is_measured(context) else None,
        "autotune.matmuls_measured",
    )


def selection_of(problem: Problem, context: Context) -> Selection:
    """A matmul as `select` takes it."""
    contest = Contest(
        problem.operands(), problem.result(), MatmulReference(), context.target.l3_bytes
    )
    return Selection(
        problem,
        contest,
        choices_of(problem)[0],
        lambda choices: question_of(problem, choices, context),
    )


def entered(problem: Problem) -> Enter:
    """A callable for each choice, on operands of these sizes and strides."""
    inputs = tuple(operand.tensor() for operand in problem.operands())
    out = torch.empty(problem.rows, problem.columns)
    return lambda choice: LibraryMatmul(choice.name, problem).loaded(inputs, out)


def exact_rows(problem: Problem) -> torch.Tensor:
    """The first rows of the product of the same operands, in float64."""
    inputs = tuple(operand.tensor() for operand in problem.operands())
    return MatmulReference().exact(inputs, torch.arange(min(_EXACT_ROWS, problem.rows)))
