"""Matmuls: which library call is fastest here, for these sizes and strides.

Two libraries come with PyTorch on the CPU and neither wins everywhere, so each distinct matmul is
raced once and the decision kept on disk. A challenger must be about as exact as the default,
judged against float64, and beat it by a margin, so that noise cannot flip a decision. In the modes
that tune more, the candidates are those of all selected sources (`select.py`).

Default mode has a second for a graph. A matmul that the graph computes most often is raced first:
a race costs as much as a few calls, so what it may save grows with their number. One that does not
fit into the time that is left is raced with fewer rows, or computed as the most similar one that
was raced.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch

from perfuse.autotune.contest import Contest
from perfuse.autotune.contractions import tune_contractions
from perfuse.autotune.device_kind import device_kind, library_versions
from perfuse.autotune.exactness import MOST_ERROR, error_gate
from perfuse.autotune.known_contractions import with_known_contractions
from perfuse.autotune.library_calls import cpu_matmul_of as cpu_matmul_of
from perfuse.autotune.library_calls import with_library_call
from perfuse.autotune.race import Enter, Rules, race, within
from perfuse.autotune.select import Selection, select
from perfuse.autotune.stored import is_consulted, stored_or_measured
from perfuse.autotune.time_limit import seconds_left
from perfuse.cache import keys
from perfuse.candidates.library import ATEN, LibraryMatmul, MatmulReference
from perfuse.candidates.library import CpuMatmul as CpuMatmul
from perfuse.candidates.library import choices_of as choices_of
from perfuse.candidates.sources import offers_for, selected_sources, source_named
from perfuse.context import Context
from perfuse.decision import OUT_OF_TIME, Choice, Decision, Question
from perfuse.gpu import Platform
from perfuse.ir.matmul import RIVALS
from perfuse.ir.program import Matmul
from perfuse.schedule.plan import Plan
from perfuse.selection import is_selecting
from perfuse.torch_compat.state import disable_dispatch_modes, disabled_autocast

# Enough rounds of short matmuls that noise does not decide: with twelve, mobilebert lost 5 %.
# The race does not see that a challenger's result is new memory, not ours.
RULES = Rules(
    margin=0.96, unseen_s=1e-5, budget_s=0.12, fewest_rounds=3, most_rounds=60, clear=1.25
)
_EXACT_ROWS, _EXACT_COLUMNS = 64, 256
# A race of two takes this many calls: one each that is checked, and one each in a round.
_CALLS_OF_A_RACE = 4
# Multiplications a second of one thread, where none was measured: half of what AVX2 reaches.
_NOMINAL_SPEED = 25e9
# The most doublings and halvings of sizes between similar matmuls.
_SIMILAR = 4.0
# Rows that stand for more of them: with fewer, libraries take other kernels.
_FEWEST_ROWS = 64


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
    if not is_selecting(context.settings):
        plan, known = with_known_contractions(plan, context, decided)
        decided = {*decided, *known}
    rest = {out: problem for out, problem in found.items() if out not in {*apart, *decided}}
    return tune_library_calls(plan, rest, context)[0]


def problems_of(plan: Plan, context: Context) -> dict[str, CpuMatmul]:
    """The matmuls among which libraries compete, by the names of their results."""
    if not _is_tuned(context):
        return {}
    # Below this the call itself costs more than any choice saves.
    least = max(1, context.settings.thresholds.tuned_matmul_work)
    matmuls = [step for step in plan.steps if isinstance(step, Matmul)]
    found = {step.out: cpu_matmul_of(step, plan.program, least) for step in matmuls}
    return {out: problem for out, problem in found.items() if problem is not None}


def _is_offered_elsewhere(problem: CpuMatmul, context: Context) -> bool:
    """Whether a selected source of its own measurements has candidates, besides the libraries."""
    offers = offers_for(problem, context).choices if is_selecting(context.settings) else {}
    return any(source is not ATEN for source in offers.values())


def tune_library_calls(
    plan: Plan, problems: Mapping[str, CpuMatmul], context: Context
) -> tuple[Plan, Set[str]]:
    """The plan with matmuls by the fastest candidates, and the results that no library computes.

    The modes that select have their own limits of time; the others decide within a second.
    """
    if not problems:
        return plan, frozenset()
    counts = Counter(problems.values())
    distinct = sorted(counts, key=lambda p: (-counts[p], -p.work, repr(p)))
    asked = [problem for problem in distinct if _has_candidates(problem, context)]
    decisions = _decide_all(asked, context)
    chosen = {out: decisions[p].chosen for out, p in problems.items() if p in decisions}
    others = {out: c for out, c in chosen.items() if source_named(c.source).apply is not None}
    plan = with_library_call(plan, {o: c for o, c in chosen.items() if o not in others})
    plan = replace(plan, decisions=(*plan.decisions, *decisions.values()))
    for matmul in [s for s in plan.steps if isinstance(s, Matmul) and s.out in others]:
        apply = source_named(others[matmul.out].source).apply
        plan = plan if apply is None else apply(plan, matmul, others[matmul.out], context)
    return plan, set(others)


def _decide_all(asked: Sequence[CpuMatmul], context: Context) -> dict[CpuMatmul, Decision]:
    """The decisions in the order of the questions; late ones follow the most similar."""
    decisions: dict[CpuMatmul, Decision] = {}
    for number, problem in enumerate(asked):
        left_s = seconds_left(context)
        has_time = expected_race_s(problem, decisions) < left_s or is_selecting(context.settings)
        share_s = left_s / (len(asked) - number)
        decisions[problem] = decide(problem, context, share_s if has_time else 0.0)
        part = _part_within(share_s, problem, decisions)
        if decisions[problem].reason == OUT_OF_TIME and part is not None:
            decisions[part] = decide(part, context, share_s)
    late = [problem for problem, made in decisions.items() if made.reason == OUT_OF_TIME]
    return decisions | {problem: _like_the_most_similar(problem, decisions) for problem in late}


def _part_within(
    seconds: float, problem: CpuMatmul, decisions: Mapping[CpuMatmul, Decision]
) -> CpuMatmul | None:
    """The matmul with so few rows that a race fits into the time; None where that is too few."""
    least = max(_FEWEST_ROWS, math.ceil(problem.rows / 2**_SIMILAR))
    rows = problem.rows
    while rows > least:
        rows = max(least, rows // 2)
        part = replace(problem, rows=rows)
        if expected_race_s(part, decisions) < seconds:
            return None if part in decisions else part
    return None


def expected_race_s(problem: CpuMatmul, decisions: Mapping[CpuMatmul, Decision]) -> float:
    """How long a race takes, by the slowest default among those that were measured before."""
    speeds = [
        p.work / (1e-6 * d.rivals[0].best_us)
        for p, d in decisions.items()
        if d.rivals and d.rivals[0].best_us
    ]
    speed = min(speeds, default=_NOMINAL_SPEED * torch.get_num_threads())
    return _CALLS_OF_A_RACE * problem.work / speed


def _like_the_most_similar(problem: CpuMatmul, decisions: Mapping[CpuMatmul, Decision]) -> Decision:
    """An open decision with the choice that was made for the most similar matmul.

    That one sums no fewer products, since errors grow with their number and were judged there.
    """
    decision = decisions[problem]
    known = {
        p: problem.distance(p)
        for p, d in decisions.items()
        if not d.is_open and p.depth >= problem.depth
    }
    nearest = min(known, key=lambda p: known[p], default=None)
    if nearest is None or known[nearest] > _SIMILAR:
        return decision
    chosen = decisions[nearest].chosen
    if chosen.name not in {choice.name for choice in choices_of(problem)}:
        chosen = decision.chosen  # the default has a name for each form
    rivals = tuple(
        replace(r, refusal=f"not measured here: as in {nearest}") if r.choice == chosen else r
        for r in decision.rivals
    )
    return replace(decision, chosen=chosen, rivals=rivals)


def _has_candidates(problem: CpuMatmul, context: Context) -> bool:
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


def question_of(problem: CpuMatmul, choices: Sequence[Choice], context: Context) -> Question:
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


def decide(problem: CpuMatmul, context: Context, share_s: float = math.inf) -> Decision:
    """The remembered decision for a matmul on this kind of machine, or a new one.

    `share_s`: the part of the time for tuning that this one may take in default mode; without any,
    nothing is measured.
    """
    if is_selecting(context.settings):
        return select(selection_of(problem, context), context)
    if not share_s:
        context = replace(context, tune_until=-math.inf)
    choices = choices_of(problem)

    def measure() -> Decision:
        with disable_dispatch_modes(), disabled_autocast():
            inputs = tuple(operand.tensor() for operand in problem.operands())
            gate = error_gate(exact_corner(inputs))
            rules = within(RULES, share_s)
            enter, deadline = entered(problem, inputs), context.tune_until
            return race(str(problem), choices, enter, rules, gate=gate, deadline=deadline)

    return stored_or_measured(
        question_of(problem, choices, context),
        str(problem),
        context,
        measure if is_measured(context) else None,
        "autotune.matmuls_measured",
    )


def selection_of(problem: CpuMatmul, context: Context) -> Selection:
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


def entered(problem: CpuMatmul, inputs: tuple[torch.Tensor, ...]) -> Enter:
    """A callable for each choice, on these operands."""
    out = torch.empty(problem.rows, problem.columns)
    return lambda choice: LibraryMatmul(choice.name, problem).loaded(inputs, out)


def exact_corner(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The first rows and columns of a product with its bias, in float64."""
    a, *rest = inputs
    corner = tuple(operand[..., :_EXACT_COLUMNS] for operand in rest)
    return MatmulReference().exact((a, *corner), torch.arange(min(_EXACT_ROWS, len(a))))
