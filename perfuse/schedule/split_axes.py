"""Axes that indices divide, split so that each index steps evenly through their parts.

A reshape after a transpose reads x[64 * (i % 64) + 4096 * (i // 64)]: along the last axis every
lane would compute its own quotient and load from an address of its own. Over two axes in the place
of i the same index is a sum of strides, and a row of 64 elements is contiguous.

A map may run over its axes in any order. So its axes are split wherever they are divided, and if
the last one is then too short for a vector, another one becomes the last: x[i // 4 + 64 * (i % 4)]
is read along i // 4, row by row, and stored with a stride of 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Division
from perfuse.ir.index import Dim, Index
from perfuse.ir.program import Axis
from perfuse.schedule import domain
from perfuse.schedule.plan import Member, Role
from perfuse.schedule.shape import all_indices
from perfuse.schedule.transposed import transposed_axis_of

# Shorter rows do not fill a vector.
LEAST_FACTOR = 8

_Parts = tuple[tuple[Axis, ...], tuple[Member, ...]]


def split_last(axes: tuple[Axis, ...], members: tuple[Member, ...]) -> _Parts:
    """Split the last axis by factors of its size, while that makes more indices even."""
    if any(m.role in (Role.SCAN, Role.SCATTER) for m in members):
        return axes, members
    while axes and (factor := _factor(axes[-1], all_indices(members))) is not None:
        parts = _split_at(axes, members, len(axes) - 1, factor)
        if _num_uneven(*parts) >= _num_uneven(axes, members):
            break  # such as (i + 3) // 64, where a vector still has lanes of two rows
        axes, members = parts
    return axes, members


def split_map(axes: tuple[Axis, ...], members: tuple[Member, ...]) -> _Parts:
    """Split the axes of a map where that gives it even or transposed reads; otherwise unchanged."""
    is_map = all(m.is_map and m.role is Role.FULL for m in members)
    if not is_map or not axes or axes[-1].atom is None:
        return axes, members
    made = _split_everywhere(axes, members)
    if len(made[0]) == len(axes):
        return axes, members
    is_uneven = _num_uneven(axes, members) > 0
    if not is_uneven and transposed_axis_of(*made) is None:
        return axes, members
    laned = _with_lanes(*made) if is_uneven else made
    return laned if laned is not None and _num_uneven(*laned) == 0 else (axes, members)


def _split_everywhere(axes: tuple[Axis, ...], members: tuple[Member, ...]) -> _Parts:
    position = 0
    while position < len(axes):
        factor = _factor(axes[position], all_indices(members), 2)
        if factor is not None:
            parts = _split_at(axes, members, position, factor)
            old, new = axes[position : position + 1], parts[0][position : position + 2]
            if _num_uneven_along(new, parts[1]) < _num_uneven_along(old, members):
                axes, members = parts
                continue
        position += 1
    return axes, members


def _with_lanes(axes: tuple[Axis, ...], members: tuple[Member, ...]) -> _Parts | None:
    """With the last axis long enough for vectors: if need be another one, that most run along."""
    if _is_long(axes[-1]):
        return axes, members
    indices = all_indices(members)
    long = [a for a in axes if _is_long(a)]
    if not long:
        return None
    last = max(long, key=lambda a: sum(_stride(index, a) == 1 for index in indices))
    ordered = (*(a for a in axes if a is not last), last)
    return ordered, tuple(_in_order(m, [a.name for a in ordered]) for m in members)


def _in_order(member: Member, names: Sequence[str]) -> Member:
    axes = tuple(sorted(member.loop.axes, key=lambda axis: names.index(axis.name)))
    return replace(member, loop=replace(member.loop, axes=axes))


def _is_long(axis: Axis) -> bool:
    return not isinstance(axis.size, int) or axis.size >= LEAST_FACTOR


def _stride(index: Dim, axis: Axis) -> Dim | None:
    assert axis.atom is not None
    return ix.coefficient_of(index, axis.atom)


def _num_uneven_along(axes: Sequence[Axis], members: Sequence[Member]) -> int:
    """The number of indices that are not sums of strides along these axes."""
    looping = [a for a in axes if a.atom is not None]
    return sum(any(_stride(index, a) is None for a in looping) for index in all_indices(members))


def _num_uneven(axes: tuple[Axis, ...], members: tuple[Member, ...]) -> int:
    """The number of indices in which the last axis is not just multiplied by a stride."""
    atom = axes[-1].atom
    assert atom is not None
    return sum(ix.coefficient_of(index, atom) is None for index in all_indices(members))


def _factor(axis: Axis, indices: Sequence[Dim], least: int = LEAST_FACTOR) -> int | None:
    """The smallest factor of an axis' size by which an index divides it."""
    atom = axis.atom
    if atom is None:
        return None
    factors = set()
    for division in divisions(indices):
        stride = ix.coefficient_of(division.numerator, atom)
        if isinstance(division.divisor, int) and isinstance(stride, int) and stride:
            factors.add(division.divisor // math.gcd(stride, division.divisor))
    return min((f for f in factors if f >= least and _is_part(f, axis.size)), default=None)


def _is_part(factor: int, size: Dim) -> bool:
    return ix.exact_div(size, factor) not in (None, 0, 1)


def divisions(indices: Sequence[Dim]) -> Iterator[Division]:
    """Quotients and remainders in these indices, also inside one another."""
    for index in indices:
        for monomial, _ in index.terms if isinstance(index, Index) else ():
            for atom in monomial:
                if isinstance(atom, Division):
                    yield atom
                    yield from divisions(atom.operands)


def _split_at(
    axes: tuple[Axis, ...], members: tuple[Member, ...], position: int, factor: int
) -> _Parts:
    """The axes and members with one axis as two, of which the inner one has its name."""
    axis = axes[position]
    number = 1 + max(int(a.name.removeprefix("x")) for a in axes)
    count = ix.exact_div(axis.size, factor)
    assert count is not None and axis.atom is not None
    outer = Axis(f"x{number}", count, axis.reduced)
    inner = replace(axis, size=factor)
    place = ix.flat([count, factor], [ix.var(a.name, a.size) for a in (outer, inner)])
    mapping: dict[Atom, Dim] = {axis.atom: place}
    made = tuple(_rewritten(m, axis.name, (outer, inner), mapping) for m in members)
    return (*axes[:position], outer, inner, *axes[position + 1 :]), made


def _rewritten(
    member: Member, name: str, parts: tuple[Axis, Axis], mapping: dict[Atom, Dim]
) -> Member:
    """A member over the parts of an axis, each reduced where the axis was."""
    axes: list[Axis] = []
    for axis in member.loop.axes:
        is_split = axis.name == name
        axes += [replace(p, reduced=axis.reduced) for p in parts] if is_split else [axis]
    return replace(member, loop=domain.rewrite(member.loop, mapping, tuple(axes)))
