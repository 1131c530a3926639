"""Matmuls: which library call is fastest here, for these sizes and strides.

Two libraries come with PyTorch on the CPU and neither wins everywhere, so each distinct matmul is
raced once and the decision kept on disk. A challenger must be about as exact as the default,
judged against float64, and beat it by a margin, so that noise cannot flip a decision. In the modes
that tune more, the candidates are those of all selected sources (`select.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from perfuse.autotune.contest import Contest
from perfuse.autotune.machine import device_kind, library_versions
from perfuse.autotune.problem import LibraryMatmul, MatmulReference
from perfuse.autotune.problem import Problem as Problem
from perfuse.autotune.problem import choices_of as choices_of
from perfuse.autotune.race import MOST_ERROR, Enter, Rules, error_gate, race
from perfuse.autotune.select import Selection, is_selecting, select
from perfuse.autotune.sources import apply_of, offers_for, selected_sources
from perfuse.autotune.stored import is_consulted, stored_or_measured
from perfuse.cache import keys
from perfuse.context import Context
from perfuse.decision import Choice, Decision, Question
from perfuse.ir.dtype import DType
from perfuse.ir.matmul import RIVALS
from perfuse.ir.program import BufferKind, Matmul, Program
from perfuse.schedule.plan import Plan
from perfuse.torch_compat.state import disable_dispatch_modes, disabled_autocast

# Enough rounds of short matmuls that noise does not decide: with twelve, mobilebert lost 5 %.
# The race does not see that a challenger's result is new memory, not ours.
RULES = Rules(margin=0.96, unseen_s=1e-5, budget_s=0.12, fewest_rounds=3, most_rounds=60)
_EXACT_ROWS = 64


def tune_matmuls(plan: Plan, context: Context) -> Plan:
    """The plan with each large matmul computed by the library call that measured fastest."""
    if is_selecting(context):  # whatever is compiled: an unknown name is an error
        selected_sources(context.settings.max_autotune_gemm_backends)
    if context.target.gpu is not None or not _is_tuned(context):
        return plan
    # Below this the call itself costs more than any choice saves.
    least = max(1, context.settings.thresholds.tuned_matmul_work)
    others: list[tuple[Matmul, Choice]] = []
    tuned: dict[int, Matmul] = {}
    decisions: dict[Problem, Decision] = {}
    buffers = dict(plan.program.buffers)
    for node in plan.program.nodes:
        problem = problem_of(node, plan.program, least) if isinstance(node, Matmul) else None
        if problem is None or not _has_candidates(problem, context):
            continue
        assert isinstance(node, Matmul)
        if problem not in decisions:
            decisions[problem] = decide(problem, context)
        chosen = decisions[problem].chosen
        if apply_of(chosen) is not None:
            others.append((node, chosen))
        elif chosen != node.choice:
            buffers[node.out] = replace(buffers[node.out], kind=BufferKind.EXTERN)
            reason = "measured fastest of the libraries here"
            tuned[id(node)] = replace(node, choice=chosen, reason=reason)
    nodes = tuple(tuned.get(id(node), node) for node in plan.program.nodes)
    program = replace(plan.program, nodes=nodes, buffers=buffers)
    steps = tuple(tuned.get(id(step), step) for step in plan.steps)
    made = (*plan.decisions, *decisions.values())
    plan = replace(plan, program=program, steps=steps, decisions=made)
    for matmul, choice in others:
        apply = apply_of(choice)
        plan = plan if apply is None else apply(plan, matmul, choice, context)
    return plan


def _has_candidates(problem: Problem, context: Context) -> bool:
    """Whether there is anything to choose from; tuners that follow may have candidates too."""
    return not is_selecting(context) or bool(offers_for(problem, context).choices)


def _is_tuned(context: Context) -> bool:
    has_rivals = any(row.is_available() for row in RIVALS)
    return is_selecting(context) or (has_rivals and (is_measured(context) or is_consulted(context)))


def is_measured(context: Context) -> bool:
    """Whether a matmul without a remembered decision is raced in the modes that select nothing."""
    return context.settings.cpu.tune_matmuls and not context.settings.search_autotune_cache


def problem_of(node: Matmul, program: Program, least_work: int) -> Problem | None:
    """The candidates to race; None for small matmuls and those that only one library computes."""
    a, b, bias = node.operands.a, node.operands.b, node.operands.bias
    if len(b.shape) != 2 or not node.into_out or node.window is not None or node.kwargs:
        return None
    views = [v for v in (bias, a, b) if v is not None]
    if any(program.buffers[v.buffer].dtype is not DType.F32 for v in views):
        return None
    dims = [d for v in views for d in (*v.shape, *v.strides)]
    if not all(isinstance(d, int) for d in dims) or (bias is not None and len(bias.shape) != 1):
        return None
    known: Any = (*a.shape, b.shape[1], a.strides, b.strides)
    rows, depth, columns, a_strides, b_strides = known
    if rows * depth * columns < least_work:
        return None
    return Problem(rows, columns, depth, a_strides, b_strides, bias is not None)


def question_of(problem: Problem, choices: Sequence[Choice], context: Context) -> Question:
    """The question which of these computes a matmul fastest on this kind of machine."""
    return Question(
        keys.MATMUL.name,
        f"{problem}, float32, strides {problem.a_strides} and {problem.b_strides}, "
        f"threads of PyTorch: {torch.get_num_threads()}",
        tuple(choices),
        device_kind(context.target),
        library_versions("cpu"),
        f"{RULES}, error {MOST_ERROR}",
    )


def decide(problem: Problem, context: Context) -> Decision:
    """The remembered decision for a matmul on this kind of machine, or a new one."""
    if is_selecting(context):
        return select(selection_of(problem, context), context)
    choices = choices_of(problem)

    def measure() -> Decision:
        with disable_dispatch_modes(), disabled_autocast():
            gate = error_gate(exact_rows(problem))
            return race(str(problem), choices, entered(problem), RULES, gate=gate)

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
