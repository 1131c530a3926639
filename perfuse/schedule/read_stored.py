"""Operands of a matmul read as they are stored: int8 or half weights that no kernel widens.

A template widens elements while it reads them. Where a kernel does nothing but that, for one matmul
alone, the matmul can take the narrow buffer itself. C++ templates for few rows also compute their
right operand, column by column, where a pointwise kernel would store all of it: weights that are
scaled by groups, for example.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Indirect
from perfuse.ir.dtype import DType
from perfuse.ir.expr import (
    Expr,
    Substitution,
    apply,
    cast,
    index_value,
    loads_of,
    round_to,
    substitute,
)
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis, Loop, Matmul, View, contiguous_strides
from perfuse.schedule.arena import output_buffers
from perfuse.schedule.domain import rewrite
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


@dataclass(frozen=True, slots=True)
class ComputedRight:
    """A right operand as one loop, and the kernels that make it otherwise, in their order."""

    kernels: tuple[Kernel, ...]
    loop: Loop


def read_stored(plan: Plan, matmul: Matmul) -> ReadStored:
    """The plan with a matmul that reads its operands where they are stored."""
    return _reading(ReadStored(plan, matmul))


def compute_right(plan: Plan, matmul: Matmul) -> ReadStored:
    """The same with a right operand that the matmul computes, where a kernel of maps makes it.

    The left operand is read where it is stored.
    """
    found, right = ReadStored(plan, matmul), computed_right(plan, matmul)
    if right is not None:
        found = replace(_dropped(found, right.kernels, matmul), prologue=right.loop)
    return _reading(found)


def _reading(found: ReadStored) -> ReadStored:
    operands = found.matmul.operands
    for view in dict.fromkeys((operands.a, operands.b)):
        kernel = _widening_kernel(found, view)
        if kernel is not None:
            found = _without(found, kernel)
    return found


def computed_right(plan: Plan, matmul: Matmul) -> ComputedRight | None:
    """The kernels that make the right operand, column by column, for this matmul alone."""
    b = matmul.operands.b
    kernel = _maker(plan, matmul, b.buffer)
    loop = _as_one_map(kernel) if kernel is not None else None
    is_by_columns = len(b.shape) == 2 and (b.strides, b.offset) == ((1, b.shape[0]), 0)
    if kernel is None or loop is None or not is_by_columns or not _is_in_order(loop, b.shape):
        return None
    found = ComputedRight((kernel,), loop)
    if ix.mod(b.shape[0], 2) == 0:
        found = _with_pairs(found, plan)
    elif loop.axes[-1].size == 2:  # a pair, computed together, would belong to two columns
        return None
    sources = {read.buffer for read in found.loop.reads()}
    later = plan.steps[plan.steps.index(found.kernels[0]) :]
    is_changed = any(written_by(step) & sources for step in later)
    return None if is_changed or not sources else found


def _is_in_order(loop: Loop, shape: tuple[Dim, ...]) -> bool:
    """Whether a loop runs over all elements of a matrix as they are stored, known in advance."""
    axes = [axis for axis in loop.axes if axis.atom is not None]
    steps = contiguous_strides(tuple(axis.size for axis in axes))
    places = [ix.var(axis.name, axis.size) for axis in axes]
    sizes = [axis.size for axis in axes]
    is_whole = all(isinstance(s, int) for s in (*shape, *sizes))
    is_whole = is_whole and ix.product(shape) == ix.product(sizes)
    atoms = [atom for read in loop.reads() for atom in ix.atoms_of(read.index)]
    by_data = any(isinstance(atom, Indirect) for atom in atoms)
    return bool(axes) and is_whole and loop.index is ix.dot(places, steps) and not by_data


def _with_pairs(found: ComputedRight, plan: Plan) -> ComputedRight:
    """The same with numbers that are unpacked two at a time, as from the halves of bytes.

    A kernel that stores first ones and second ones side by side is no longer needed: its loops run
    over an axis of two.
    """
    (kernel,), loop = found.kernels, found.loop
    *outer, last = loop.axes
    half = ix.exact_div(last.size, 2)
    if last.atom is None or half is None:
        return found
    number = 1 + max(int(axis.name.removeprefix("x")) for axis in loop.axes)
    first, second = replace(last, size=half), Axis(f"x{number}", 2)
    at = ix.var(second.name, 2)
    place = ix.add(ix.mul(ix.var(first.name, half), 2), at)
    split = rewrite(loop, {last.atom: place}, (*outer, first, second))
    is_first = apply("lt", index_value(at), index_value(1))
    pair = ix.exact_div(ix.add(split.index, ix.mul(at, -1)), 2)
    for name in dict.fromkeys(read.buffer for read in loop.reads()):
        makers = _makers(plan, kernel, name)
        stored = [m.loop for maker in makers for m in maker.members]
        if pair is None or len(stored) != 2 or not all(map(_is_of_pairs, stored, range(2))):
            continue
        reads = [read for read in split.reads() if read.buffer == name]
        if any(read.index is not split.index or read.args for read in reads):
            continue
        dtype = plan.program.buffers[name].dtype
        places = (_as_stored(_value_at(part, pair), dtype) for part in stored)
        value = apply("where", is_first, *places)
        unpacked = Substitution({}, lambda r, n=name, v=value: v if r.buffer == n else r)  # type: ignore[misc]
        return ComputedRight((*makers, kernel), replace(split, value=unpacked(split.value)))
    return found


def _is_of_pairs(loop: Loop, number: int) -> bool:
    """Whether a map stores the first (0) or second (1) of every pair, in order."""
    axes = [axis for axis in loop.axes if axis.atom is not None]
    steps = contiguous_strides(tuple(axis.size for axis in axes))
    pair = ix.dot([ix.var(axis.name, axis.size) for axis in axes], steps)
    return loop.is_map and loop.index is ix.add(ix.mul(pair, 2), number)


def _value_at(loop: Loop, number: Dim) -> Expr:
    """The value of a map in one of its steps, counted in order."""
    axes = [axis for axis in loop.axes if axis.atom is not None]
    steps = contiguous_strides(tuple(axis.size for axis in axes))
    mapping: dict[Atom, Dim] = {}
    for axis, step in zip(axes, steps, strict=True):
        if axis.atom is not None:
            whole = axis is axes[0]
            at = ix.floordiv(number, step)
            mapping[axis.atom] = at if whole else ix.mod(at, axis.size)
    return substitute(loop.value, mapping)


def _as_stored(value: Expr, dtype: DType) -> Expr:
    """A value as it is read back from a buffer."""
    return round_to(cast(value, dtype.compute), dtype)


def _as_one_map(kernel: Kernel) -> Loop | None:
    """The loops of a kernel as one, where all are maps of which only the last one is stored."""
    if not all(m.is_map for m in kernel.members):
        return None
    *others, last = (m.loop for m in kernel.members)
    if kernel.stored != {last.out}:
        return None
    values: dict[str, tuple[Expr, Dim]] = {}

    def inlined(read: Expr) -> Expr:
        value, index = values.get(read.buffer, (read, read.index))
        return value if index is read.index and not read.args else read

    for loop in (*others, last):
        value = Substitution({}, inlined)(loop.value)
        values[loop.out] = (value, loop.index)
    is_kept = any(read.buffer in values for read in loads_of(value))
    return None if is_kept else replace(last, value=value)


def _maker(plan: Plan, only: Step, name: str) -> Kernel | None:
    """The kernel of loops that makes a buffer which one step alone reads."""
    makers = _makers(plan, only, name)
    return makers[0] if len(makers) == 1 else None


def _makers(plan: Plan, only: Step, name: str) -> list[Kernel]:
    """The kernels of loops that make a buffer which one step alone reads; none if others do."""
    makers = [s for s in plan.steps if isinstance(s, Kernel) and name in s.makes()]
    readers = [s for s in plan.steps if name in s.reads()]
    if readers != [only] or name in output_buffers(plan.program):
        return []
    is_plain = all(k.batch is None and k.contraction is None and k.members for k in makers)
    return makers if is_plain else []


def _widening_kernel(found: ReadStored, view: View) -> Kernel | None:
    """The kernel that makes an operand by widening another buffer, for this matmul alone."""
    plan = found.plan
    kernel = _maker(plan, found.matmul, view.buffer)
    if kernel is None or len(kernel.members) != 1:
        return None
    source = _source(kernel.members[0], plan)
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
    return _dropped(found, (kernel,), matmul)


def _dropped(found: ReadStored, kernels: tuple[Kernel, ...], matmul: Matmul) -> ReadStored:
    """The plan without some kernels, and with a matmul that does not need them."""
    removed = {member.number for kernel in kernels for member in kernel.members}
    program = found.plan.program
    nodes = [
        matmul if node is found.matmul else node
        for number, node in enumerate(program.nodes)
        if number not in removed
    ]
    steps = [
        _renumbered(matmul if step is found.matmul else step, removed)
        for step in found.plan.steps
        if not any(step is kernel for kernel in kernels)
    ]
    plan = replace(found.plan, program=replace(program, nodes=tuple(nodes)), steps=tuple(steps))
    return replace(found, plan=plan, matmul=matmul, widening=(*found.widening, *kernels))


def _renumbered(step: Step, removed: Set[int]) -> Step:
    """A step in a program that lost some nodes."""
    if not isinstance(step, Kernel):
        return step
    members = tuple(
        replace(m, number=m.number - sum(number < m.number for number in removed))
        for m in step.members
    )
    return replace(step, members=members)
