"""Axes that indices divide, split so that each index steps evenly through their parts.

A reshape after a transpose reads x[64 * (i % 64) + 4096 * (i // 64)]: along the last axis every
lane would compute its own quotient and load from an address of its own. Over two axes in the place
of i the same index is a sum of strides, and a row of 64 elements is contiguous.
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

# Shorter rows do not fill a vector.
LEAST_FACTOR = 8


def split_last(
    axes: tuple[Axis, ...], members: tuple[Member, ...]
) -> tuple[tuple[Axis, ...], tuple[Member, ...]]:
    """Split the last axis by factors of its size, while that makes more indices even."""
    if any(m.role in (Role.SCAN, Role.SCATTER) for m in members):
        return axes, members
    while axes and (factor := _factor(axes[-1], all_indices(members))) is not None:
        parts = _split(axes, members, factor)
        if _num_uneven(*parts) >= _num_uneven(axes, members):
            break  # such as (i + 3) // 64, where a vector still has lanes of two rows
        axes, members = parts
    return axes, members


def _num_uneven(axes: tuple[Axis, ...], members: tuple[Member, ...]) -> int:
    """The number of indices in which the last axis is not just multiplied by a stride."""
    atom = axes[-1].atom
    assert atom is not None
    return sum(ix.coefficient_of(index, atom) is None for index in all_indices(members))


def _factor(axis: Axis, indices: Sequence[Dim]) -> int | None:
    """The smallest factor of an axis' size by which an index divides it."""
    atom = axis.atom
    if atom is None:
        return None
    factors = set()
    for division in _divisions(indices):
        stride = ix.coefficient_of(division.numerator, atom)
        if isinstance(division.divisor, int) and isinstance(stride, int) and stride:
            factors.add(division.divisor // math.gcd(stride, division.divisor))
    return min((f for f in factors if _is_part(f, axis.size)), default=None)


def _is_part(factor: int, size: Dim) -> bool:
    return factor >= LEAST_FACTOR and ix.exact_div(size, factor) not in (None, 0, 1)


def _divisions(indices: Sequence[Dim]) -> Iterator[Division]:
    """Quotients and remainders in these indices, also inside one another."""
    for index in indices:
        for monomial, _ in index.terms if isinstance(index, Index) else ():
            for atom in monomial:
                if isinstance(atom, Division):
                    yield atom
                    yield from _divisions(atom.operands)


def _split(
    axes: tuple[Axis, ...], members: tuple[Member, ...], factor: int
) -> tuple[tuple[Axis, ...], tuple[Member, ...]]:
    """The axes and members with the last axis as two, of which the inner one has its name."""
    *rest, last = axes
    number = 1 + max(int(axis.name.removeprefix("x")) for axis in axes)
    count = ix.exact_div(last.size, factor)
    assert count is not None and last.atom is not None
    outer = Axis(f"x{number}", count, last.reduced)
    inner = replace(last, size=factor)
    position = ix.flat([count, factor], [ix.var(a.name, a.size) for a in (outer, inner)])
    mapping: dict[Atom, Dim] = {last.atom: position}
    made = tuple(_rewritten(m, last.name, (outer, inner), mapping) for m in members)
    return (*rest, outer, inner), made


def _rewritten(
    member: Member, name: str, parts: tuple[Axis, Axis], mapping: dict[Atom, Dim]
) -> Member:
    """A member over the parts of an axis, each reduced where the axis was."""
    axes: list[Axis] = []
    for axis in member.loop.axes:
        is_split = axis.name == name
        axes += [replace(p, reduced=axis.reduced) for p in parts] if is_split else [axis]
    return replace(member, loop=domain.rewrite(member.loop, mapping, tuple(axes)))
