"""Operands of a matmul read as they are stored: int8 or half weights that no kernel widens.

A template widens elements while it reads them. Where a kernel does nothing but that, for one matmul
alone, the matmul can take the narrow buffer itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.program import Matmul, View
from perfuse.schedule.arena import output_buffers
from perfuse.schedule.plan import Kernel, Member, Plan, Step, written_by

# Types, and the wider types that can represent all of their values.
_HELD_BY = {
    DType.I8: (DType.F32, DType.BF16, DType.F16),
    DType.U8: (DType.F32, DType.BF16, DType.F16),
    DType.BF16: (DType.F32,),
    DType.F16: (DType.F32,),
}


@dataclass(frozen=True, slots=True)
class ReadStored:
    """A plan in which a matmul reads narrow operands, and the kernels it no longer needs."""

    plan: Plan
    matmul: Matmul
    widening: tuple[Kernel, ...] = ()


def read_stored(plan: Plan, matmul: Matmul) -> ReadStored:
    """The plan with a matmul that reads its operands where they are stored."""
    found = ReadStored(plan, matmul)
    for view in dict.fromkeys((matmul.operands.a, matmul.operands.b)):
        kernel = _widening_kernel(found, view)
        if kernel is not None:
            found = _without(found, kernel)
    return found


def _widening_kernel(found: ReadStored, view: View) -> Kernel | None:
    """The kernel that makes an operand by widening another buffer, for this matmul alone."""
    plan, name = found.plan, view.buffer
    makers = [s for s in plan.steps if isinstance(s, Kernel) and name in s.makes()]
    readers = [s for s in plan.steps if name in s.reads()]
    if len(makers) != 1 or readers != [found.matmul] or name in output_buffers(plan.program):
        return None
    (kernel,) = makers
    is_plain = kernel.batch is None and kernel.contraction is None and len(kernel.members) == 1
    source = _source(kernel.members[0], plan) if is_plain else None
    if source is None:
        return None
    first, last = plan.steps.index(kernel), plan.steps.index(found.matmul)
    is_changed = any(source in written_by(step) for step in plan.steps[first:last])
    return None if is_changed else kernel


def _source(member: Member, plan: Plan) -> str | None:
    """The buffer of which a member is the same elements in the same order, in a wider type."""
    value: Expr = member.loop.value
    while value.op in ("round_to", "cast"):
        value = value.args[0]
    if value.op != "load" or value.args or not member.loop.is_map:
        return None
    source, index = value.attr
    wide = plan.program.buffers[member.loop.out].dtype
    is_held = wide in _HELD_BY.get(plan.program.buffers[source].dtype, ())
    return source if is_held and index is member.loop.index else None


def _without(found: ReadStored, kernel: Kernel) -> ReadStored:
    (member,) = kernel.members
    source = _source(member, found.plan)
    assert source is not None
    made = member.loop.out

    def moved(view: View) -> View:
        return replace(view, buffer=source) if view.buffer == made else view

    old = found.matmul.operands
    matmul = replace(found.matmul, operands=replace(old, a=moved(old.a), b=moved(old.b)))
    program = found.plan.program
    nodes = [matmul if node is found.matmul else node for node in program.nodes]
    del nodes[member.number]
    steps = [
        _renumbered(matmul if step is found.matmul else step, member.number)
        for step in found.plan.steps
        if step is not kernel
    ]
    plan = replace(found.plan, program=replace(program, nodes=tuple(nodes)), steps=tuple(steps))
    return ReadStored(plan, matmul, (*found.widening, kernel))


def _renumbered(step: Step, removed: int) -> Step:
    """A step in a program that lost a node."""
    if not isinstance(step, Kernel):
        return step
    members = tuple(
        replace(m, number=m.number - 1) if m.number > removed else m for m in step.members
    )
    return replace(step, members=members)
