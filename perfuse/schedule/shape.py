"""The shape of one kernel: merging axes that are contiguous in memory, and its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis
from perfuse.schedule import domain
from perfuse.schedule.fuse import Group
from perfuse.schedule.plan import Member, Role


def axes_of(group: Group) -> tuple[Axis, ...]:
    inner = group.inner or (False,) * len(group.sizes)
    return tuple(
        Axis(f"x{i}", size, flag)
        for i, (size, flag) in enumerate(zip(group.sizes, inner, strict=True))
    )


def collapse(
    axes: tuple[Axis, ...], members: tuple[Member, ...]
) -> tuple[tuple[Axis, ...], tuple[Member, ...]]:
    """Merge neighbouring axes wherever every access steps through them as through one."""
    indices = all_indices(members)
    position = 0
    while position + 1 < len(axes):
        outer, inner = axes[position], axes[position + 1]
        if _can_merge(outer, inner, members, indices):
            axes, members = _merge_axes(axes, position, members)
            indices = all_indices(members)
        else:
            position += 1
    return axes, members


def all_indices(members: Sequence[Member]) -> list[Dim]:
    found: list[Dim] = []
    seen: set[Expr] = set()
    for m in members:
        found.append(m.loop.index)
        for value in (m.loop.value, *(atom.value for atom in ex.value_atoms(m.loop.index))):
            found += [e.index for e in ex.walk(value, seen) if e.op in ("load", "index")]
    return list(dict.fromkeys(found))


def _can_merge(outer: Axis, inner: Axis, members: Sequence[Member], indices: Sequence[Dim]) -> bool:
    if outer.reduced != inner.reduced or outer.atom is None or inner.atom is None:
        return False
    for m in members:
        flags = {a.name: a.reduced for a in m.loop.axes}
        if flags.get(outer.name) != flags.get(inner.name):
            return False
        if m.role == Role.SCAN and outer.reduced:
            return False
    for index in indices:
        a, b = ix.coefficient_of(index, outer.atom), ix.coefficient_of(index, inner.atom)
        if a is None or b is None or a != ix.mul(b, inner.size):
            return False
    return True


def _merge_axes(
    axes: tuple[Axis, ...], position: int, members: tuple[Member, ...]
) -> tuple[tuple[Axis, ...], tuple[Member, ...]]:
    outer, inner = axes[position], axes[position + 1]
    size = ix.mul(outer.size, inner.size)
    merged = Axis(inner.name, size, inner.reduced)
    assert outer.atom is not None and inner.atom is not None
    mapping: dict[Atom, Dim] = {outer.atom: 0, inner.atom: ix.var(inner.name, size)}
    rewritten = []
    for m in members:
        kept = tuple(
            replace(a, size=size) if a.name == inner.name else a
            for a in m.loop.axes
            if a.name != outer.name
        )
        rewritten.append(replace(m, loop=domain.rewrite(m.loop, mapping, kept)))
    return (*axes[:position], merged, *axes[position + 2 :]), tuple(rewritten)


def stage(members: tuple[Member, ...], arguments: Collection[str]) -> tuple[Member, ...]:
    """Number the sweeps over a row: a reduction's result is there one stage after its sweep.

    Row values of stage s are computed before sweep s. Maps that only later sweeps use move there,
    so that nothing has to be kept between sweeps. What overwrites a buffer that others read comes
    last of all: their formulas may be recomputed in any sweep. Stores to `arguments` stay in place.
    """
    overwriting = [m for i, m in enumerate(members) if _overwrites(m, members[:i])]
    members = (*(m for m in members if m not in overwriting), *overwriting)
    made: dict[str, list[int]] = {}
    levels: list[int] = []
    for m in members:
        level = 0
        for read in m.loop.reads():
            for j in made.get(read.buffer, ()):
                level = max(level, levels[j] + (members[j].role == Role.INNER))
        levels.append(max([level, *levels]) if m in overwriting else level)
        made.setdefault(m.loop.out, []).append(len(levels) - 1)
    _move_later(members, levels, arguments)
    return tuple(replace(m, stage=s) for m, s in zip(members, levels, strict=True))


def _overwrites(member: Member, earlier: Sequence[Member]) -> bool:
    """An earlier loop of the kernel reads what was there before."""
    return any(r.buffer == member.loop.out for m in earlier for r in m.loop.reads())


def _move_later(members: tuple[Member, ...], levels: list[int], arguments: Collection[str]) -> None:
    users: dict[str, list[int]] = {}
    for i, m in enumerate(members):
        for read in m.loop.reads():
            users.setdefault(read.buffer, []).append(i)
    writers = Counter(m.loop.out for m in members)
    overwritten: set[str] = set()
    for i in reversed(range(len(members))):
        m = members[i]
        reads_old = any(r.buffer in overwritten for r in m.loop.reads())
        overwritten.add(m.loop.out)
        is_fixed = reads_old or writers[m.loop.out] > 1 or m.loop.out in arguments
        if is_fixed or m.role != Role.FULL:
            continue
        later = [levels[j] for j in users.get(m.loop.out, ()) if members[j].role != Role.ROW]
        if later:
            levels[i] = max(levels[i], min(later))
