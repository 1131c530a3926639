"""Operands of a matmul read as they are stored: int8 or half weights that no kernel widens.

A template widens elements while it reads them. Where a kernel does nothing but that, for one matmul
alone, the matmul can take the narrow buffer itself. C++ templates for few rows also compute their
right operand, column by column, where a pointwise kernel would store all of it: weights that are
scaled by groups, for example.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perfuse.ir import index as ix
from perfuse.ir.atoms import Indirect
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.program import Loop, Matmul, View, contiguous_strides
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
    prologue: Loop | None = None  # computes the right operand inside the matmul's kernel


def read_stored(plan: Plan, matmul: Matmul) -> ReadStored:
    """The plan with a matmul that reads its operands where they are stored."""
    return _reading(ReadStored(plan, matmul))


def compute_right(plan: Plan, matmul: Matmul) -> ReadStored:
    """The same with a right operand that the matmul computes, where a kernel of one map makes it.

    The left operand is read where it is stored.
    """
    found, kernel = ReadStored(plan, matmul), computed_right(plan, matmul)
    if kernel is not None:
        made = _dropped(found, kernel, matmul)
        found = replace(made, prologue=kernel.members[0].loop)
    return _reading(found)


def _reading(found: ReadStored) -> ReadStored:
    operands = found.matmul.operands
    for view in dict.fromkeys((operands.a, operands.b)):
        kernel = _widening_kernel(found, view)
        if kernel is not None:
            found = _without(found, kernel)
    return found


def computed_right(plan: Plan, matmul: Matmul) -> Kernel | None:
    """The kernel that makes the right operand, column by column, for this matmul alone."""
    b = matmul.operands.b
    kernel = _maker(plan, matmul, b.buffer)
    if kernel is None or len(b.shape) != 2 or (b.strides, b.offset) != ((1, b.shape[0]), 0):
        return None
    loop = kernel.members[0].loop
    axes = [axis for axis in loop.axes if axis.atom is not None]
    steps = contiguous_strides(tuple(axis.size for axis in axes))
    places = [ix.var(axis.name, axis.size) for axis in axes]
    is_in_order = axes and loop.is_map and loop.index is ix.dot(places, steps)
    sizes = (*b.shape, *(axis.size for axis in axes))
    is_whole = all(isinstance(s, int) for s in sizes) and ix.product(b.shape) == ix.product(
        [axis.size for axis in axes]
    )
    indices = [read.index for read in loop.reads()]
    by_data = any(isinstance(atom, Indirect) for at in indices for atom in ix.atoms_of(at))
    if not is_in_order or not is_whole or by_data or not indices:
        return None
    sources = {read.buffer for read in loop.reads()}
    later = plan.steps[plan.steps.index(kernel) :]
    return None if any(written_by(step) & sources for step in later) else kernel


def _maker(plan: Plan, matmul: Matmul, name: str) -> Kernel | None:
    """The kernel of one loop that makes a buffer which this matmul alone reads."""
    makers = [s for s in plan.steps if isinstance(s, Kernel) and name in s.makes()]
    readers = [s for s in plan.steps if name in s.reads()]
    if len(makers) != 1 or readers != [matmul] or name in output_buffers(plan.program):
        return None
    (kernel,) = makers
    is_plain = kernel.batch is None and kernel.contraction is None and len(kernel.members) == 1
    return kernel if is_plain else None


def _widening_kernel(found: ReadStored, view: View) -> Kernel | None:
    """The kernel that makes an operand by widening another buffer, for this matmul alone."""
    plan = found.plan
    kernel = _maker(plan, found.matmul, view.buffer)
    source = _source(kernel.members[0], plan) if kernel is not None else None
    if kernel is None or source is None:
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
    return _dropped(found, kernel, matmul)


def _dropped(found: ReadStored, kernel: Kernel, matmul: Matmul) -> ReadStored:
    """The plan without a kernel of one loop, and with a matmul that does not need it."""
    (member,) = kernel.members
    program = found.plan.program
    nodes = [matmul if node is found.matmul else node for node in program.nodes]
    del nodes[member.number]
    steps = [
        _renumbered(matmul if step is found.matmul else step, member.number)
        for step in found.plan.steps
        if step is not kernel
    ]
    plan = replace(found.plan, program=replace(program, nodes=tuple(nodes)), steps=tuple(steps))
    return replace(found, plan=plan, matmul=matmul, widening=(*found.widening, kernel))


def _renumbered(step: Step, removed: int) -> Step:
    """A step in a program that lost a node."""
    if not isinstance(step, Kernel):
        return step
    members = tuple(
        replace(m, number=m.number - 1) if m.number > removed else m for m in step.members
    )
    return replace(step, members=members)
