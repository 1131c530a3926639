"""Matmuls on a CPU as library calls: the candidates to race, and the plan with the winner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from perfuse.candidates.library import CpuMatmul
from perfuse.decision import Choice, library
from perfuse.ir.dtype import DType
from perfuse.ir.matmul import rival_call
from perfuse.ir.program import BufferKind, Matmul, Program
from perfuse.schedule.plan import Plan
from perfuse.schedule.size_hints import have_hints, value_of

_REASON = "measured fastest of the libraries here"


def cpu_matmul_of(node: Matmul, program: Program, least_work: int) -> CpuMatmul | None:
    """The candidates to race; None for small matmuls and those that only one library computes.

    Dynamic sizes have their likely values: a library call computes any size. Formulas and sizes
    that depend on data have none: a guess may even be negative.
    """
    a, b, bias = node.operands.a, node.operands.b, node.operands.bias
    if len(b.shape) != 2 or not node.into_out or node.window is not None or node.kwargs:
        return None
    views = [v for v in (bias, a, b) if v is not None]
    if any(program.buffers[v.buffer].dtype is not DType.F32 for v in views):
        return None
    dims = [d for v in views for d in (*v.shape, *v.strides)]
    if not have_hints(dims, program.hints) or (bias is not None and len(bias.shape) != 1):
        return None
    (rows, depth), (_, columns), a_strides, b_strides = (
        (value_of(first, program.hints), value_of(second, program.hints))
        for first, second in (a.shape, b.shape, a.strides, b.strides)
    )
    if rows * depth * columns < least_work:
        return None
    return CpuMatmul(rows, columns, depth, a_strides, b_strides, bias is not None)


def with_library_call(plan: Plan, choices: Mapping[str, Choice]) -> Plan:
    """The plan with matmuls computed by other calls, by the names of their results."""
    tuned = {
        step.out: replace(step, choice=_for_sizes_of(step, choices[step.out]), reason=_REASON)
        for step in plan.steps
        if isinstance(step, Matmul) and choices.get(step.out, step.choice) != step.choice
    }
    buffers = dict(plan.program.buffers)
    for matmul in tuned.values():
        buffers[matmul.out] = replace(buffers[matmul.out], kind=BufferKind.EXTERN)
    nodes = tuple(tuned.get(n.out, n) if isinstance(n, Matmul) else n for n in plan.program.nodes)
    program = replace(plan.program, nodes=nodes, buffers=buffers)
    steps = tuple(tuned.get(s.out, s) if isinstance(s, Matmul) else s for s in plan.steps)
    return replace(plan, program=program, steps=steps)


def _for_sizes_of(matmul: Matmul, choice: Choice) -> Choice:
    """The choice, or the call in its place where the sizes of a matmul change."""
    rival = rival_call(choice.name)
    sizes = (*matmul.operands.a.shape, *matmul.operands.b.shape)
    if rival is None or not rival.of_changing_sizes or all(isinstance(n, int) for n in sizes):
        return choice
    return library(rival.of_changing_sizes)
