"""Matmuls: which library call is fastest here, for these sizes and strides.

Two libraries come with PyTorch on the CPU and neither wins everywhere, so each distinct matmul is
raced once and the decision kept on disk. A challenger must be about as exact as the default,
judged against float64, and beat it by a margin, so that noise cannot flip a decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from perfuse.autotune.machine import device_kind, library_versions
from perfuse.autotune.race import MOST_ERROR, Enter, Rules, Run, error_gate, race
from perfuse.autotune.stored import is_consulted, stored_or_measured
from perfuse.cache import keys
from perfuse.context import Context
from perfuse.decision import Choice, Decision, Question, library
from perfuse.ir.dtype import DType
from perfuse.ir.matmul import RIVALS, Operands, call_arguments, rival_call
from perfuse.ir.program import BufferKind, Matmul, Program
from perfuse.runtime.host_names import resolve_op
from perfuse.schedule.plan import Plan
from perfuse.torch_compat.state import disable_dispatch_modes, disabled_autocast

# Enough rounds of short matmuls that noise does not decide: with twelve, mobilebert lost 5 %.
# The race does not see that a challenger's result is new memory, not ours.
RULES = Rules(margin=0.96, unseen_s=1e-5, budget_s=0.12, fewest_rounds=3, most_rounds=60)
_EXACT_ROWS = 64


@dataclass(frozen=True, slots=True)
class Problem:
    """a @ b (+ bias) in float32, by sizes and strides."""

    rows: int
    columns: int
    depth: int
    a_strides: tuple[int, int]
    b_strides: tuple[int, int]
    has_bias: bool

    def __str__(self) -> str:
        bias = " + bias" if self.has_bias else ""
        return f"matmul {self.rows}x{self.depth}x{self.columns}{bias}"


def tune_matmuls(plan: Plan, context: Context) -> Plan:
    """The plan with each large matmul computed by the library call that measured fastest."""
    is_tuned = context.target.gpu is None and (is_measured(context) or is_consulted(context))
    if not is_tuned or not any(row.is_available() for row in RIVALS):
        return plan
    # Below this the call itself costs more than any choice saves.
    least = max(1, context.settings.thresholds.tuned_matmul_work)
    tuned: dict[int, Matmul] = {}
    decisions: dict[Problem, Decision] = {}
    buffers = dict(plan.program.buffers)
    for node in plan.program.nodes:
        problem = problem_of(node, plan.program, least) if isinstance(node, Matmul) else None
        if problem is None:
            continue
        assert isinstance(node, Matmul)
        if problem not in decisions:
            decisions[problem] = decide(problem, context)
        if decisions[problem].chosen != node.choice:
            buffers[node.out] = replace(buffers[node.out], kind=BufferKind.EXTERN)
            reason = "measured fastest of the libraries here"
            tuned[id(node)] = replace(node, choice=decisions[problem].chosen, reason=reason)
    nodes = tuple(tuned.get(id(node), node) for node in plan.program.nodes)
    program = replace(plan.program, nodes=nodes, buffers=buffers)
    steps = tuple(tuned.get(id(step), step) for step in plan.steps)
    made = (*plan.decisions, *decisions.values())
    return replace(plan, program=program, steps=steps, decisions=made)


def is_measured(context: Context) -> bool:
    """Whether a matmul without a remembered decision is raced."""
    settings = context.settings
    return settings.cpu.tune_matmuls and (
        settings.max_autotune or not settings.search_autotune_cache
    )


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


def choices_of(problem: Problem) -> Sequence[Choice]:
    """The library calls that compute it, the default first."""
    default = "aten.addmm.out" if problem.has_bias else "aten.mm.out"
    return tuple(map(library, (default, *(row.op for row in RIVALS if row.is_available()))))


def question_of(problem: Problem, context: Context) -> Question:
    """The question which library call computes a matmul fastest on this kind of machine."""
    return Question(
        keys.MATMUL.name,
        f"{problem}, float32, strides {problem.a_strides} and {problem.b_strides}, "
        f"threads of PyTorch: {torch.get_num_threads()}",
        tuple(choices_of(problem)),
        device_kind(context.target),
        library_versions("cpu"),
        f"{RULES}, error {MOST_ERROR}",
    )


def decide(problem: Problem, context: Context) -> Decision:
    """The remembered decision for a matmul on this kind of machine, or a new one."""
    choices = choices_of(problem)

    def measure() -> Decision:
        with disable_dispatch_modes(), disabled_autocast():
            gate = error_gate(exact_rows(problem))
            return race(str(problem), choices, entered(problem), RULES, gate=gate)

    return stored_or_measured(
        question_of(problem, context),
        str(problem),
        context,
        measure if is_measured(context) else None,
        "autotune.matmuls_measured",
    )


def entered(problem: Problem) -> Enter:
    """A callable for each choice, on operands of these sizes and strides."""
    operands = Operands(*_operands(problem))
    out = torch.empty(problem.rows, problem.columns)

    def enter(choice: Choice) -> Run:
        op, args = resolve_op(choice.name), call_arguments(choice.name, operands)
        if rival_call(choice.name) is not None:
            return lambda: op(*args)
        return lambda: op(*args, out=out)

    return enter


def exact_rows(problem: Problem) -> torch.Tensor:
    """The first rows of the product of the same operands, in float64."""
    a, b, bias = _operands(problem)
    exact = a[:_EXACT_ROWS].double() @ b.double()
    return exact if bias is None else exact + bias


def _operands(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The same random numbers each time, from a generator of our own."""
    generator = torch.Generator().manual_seed(0)
    a = _random((problem.rows, problem.depth), problem.a_strides, generator)
    b = _random((problem.depth, problem.columns), problem.b_strides, generator)
    bias = torch.randn(problem.columns, generator=generator) if problem.has_bias else None
    return a, b, bias


def _random(
    shape: tuple[int, int], strides: tuple[int, int], generator: torch.Generator
) -> torch.Tensor:
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.randn(span, generator=generator).as_strided(shape, strides)
