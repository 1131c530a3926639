"""Fusion: loops that share data and can share axes become one kernel.

Each node starts as a group of its own; groups merge when (1) no path leads from one to the other
through a third, (2) their axes can be made common, and (3) what passes between them is
the same element or the same row. Every refusal is kept with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis, Buffer, LibraryCall, Loop, Node, Program, sizes_from_data
from perfuse.schedule import domain
from perfuse.schedule.legality import CannotMerge, check_flow, check_overwriting
from perfuse.schedule.plan import Member, Refusal, Role, static_product
from perfuse.schedule.transposed import quantised_axes

# Column accumulators live in cache beside the row: beyond this many columns they would not.
_MOST_OUTER_COLUMNS = 1 << 17
_MOST_BUFFERS = 32
# Compilers take more than linear time over one long kernel: with g++ 12, fifty strided loads take
# 0.7 s, three hundred take 10 s. Equal pieces of a chain are compiled once, and beside the cost of
# a piece its trip through memory is small.
_MOST_READS, _MOST_COST = 64, 1600
_MOST_REFUSALS = 200


@dataclass(slots=True)
class Group:
    """Loops over common sizes; `inner` marks the columns (None: not decided yet)."""

    nodes: tuple[int, ...]
    sizes: tuple[Dim, ...]
    inner: tuple[bool, ...] | None
    members: tuple[Member, ...]
    is_fixed: bool = False  # calls, scans and scatters stay alone

    @property
    def is_all_maps(self) -> bool:
        return self.inner is None and all(m.role == Role.FULL for m in self.members)


def group_of(number: int, node: Node) -> Group:
    """The group a node starts as."""
    if isinstance(node, LibraryCall):
        return Group((number,), (), None, (), is_fixed=True)
    return _group_over(number, node, domain.natural_order(node))


def _group_over(number: int, node: Loop, axes: tuple[Axis, ...]) -> Group:
    sizes = tuple(a.size for a in axes)
    pairs = zip((a.atom for a in axes), domain.axis_names(sizes), strict=True)
    mapping = {atom: x for atom, x in pairs if atom is not None and ix.as_atom(x) is not atom}
    role, inner = _role(node, axes)
    renamed = tuple(Axis(f"x{i}", a.size, a.reduced) for i, a in enumerate(axes))
    loop = domain.rewrite(node, mapping, renamed)
    fixed = role in (Role.SCAN, Role.SCATTER)
    return Group((number,), sizes, inner, (Member(loop, role, number),), fixed)


def _role(node: Loop, axes: tuple[Axis, ...]) -> tuple[Role, tuple[bool, ...] | None]:
    if node.kind.is_scan:
        return Role.SCAN, (*[False] * (len(axes) - 1), True)
    if node.is_scatter:
        return Role.SCATTER, None
    flags = tuple(a.reduced for a in axes)
    if not any(flags):
        return Role.FULL, None
    if all(flags):
        # Positions are combined with their values, which only the lanes of one row do.
        return (Role.INNER, flags) if node.kind.is_position else (Role.ALL, None)
    lead = flags.index(False)
    if lead and not any(flags[lead:]) and not node.kind.is_position:
        columns = static_product([a.size for a in axes[lead:]])
        if columns is None or columns <= _MOST_OUTER_COLUMNS:
            return Role.OUTER, (*[False] * lead, *[True] * (len(flags) - lead))
    return Role.INNER, flags


def merge(a: Group, b: Group) -> Group:
    """One group of two, `a` before `b` where they depend on each other; raises CannotMerge."""
    if a.is_fixed or b.is_fixed:
        raise CannotMerge("a library call, scan or scatter runs alone")
    joined = _common(a, b)
    if joined is None and b.is_all_maps:
        joined = _rows_of(a, b)
    if joined is None and a.is_all_maps:
        joined = _swap(_rows_of(b, a))
    if joined is None:
        raise CannotMerge(f"axes {_text(a)} and {_text(b)} do not match")
    sizes, inner, first, second = joined
    check_flow(first, second)
    check_flow(second, first)
    members = tuple(sorted(first + second, key=lambda m: m.number))
    check_overwriting(members)
    merged = Group(tuple(sorted(a.nodes + b.nodes)), sizes, inner, members)
    names = {r.buffer for m in members for r in m.loop.reads()}
    if len(names | {m.loop.out for m in members}) > _MOST_BUFFERS:
        raise CannotMerge(f"together they would touch more than {_MOST_BUFFERS} buffers")
    _check_length(members)
    return merged


def _check_length(members: tuple[Member, ...]) -> None:
    reads = {read for m in members for read in m.loop.reads()}
    if len(reads) > _MOST_READS or sum(m.loop.value.cost for m in members) > _MOST_COST:
        raise CannotMerge("together they would be too long for the compiler")


_Joined = tuple[tuple[Dim, ...], tuple[bool, ...] | None, tuple[Member, ...], tuple[Member, ...]]


def _swap(joined: _Joined | None) -> _Joined | None:
    return None if joined is None else (joined[0], joined[1], joined[3], joined[2])


def _text(group: Group) -> str:
    marks = group.inner or (False,) * len(group.sizes)
    return str([f"{s!r}{'*' if m else ''}" for s, m in zip(group.sizes, marks, strict=True)])


def _common(a: Group, b: Group) -> _Joined | None:
    """Both run over the same number of elements: split axes until they agree."""
    found = domain.refine(a.sizes, b.sizes)
    if found is None:
        return None
    sizes, parts_a, parts_b = found
    flags_a, flags_b = _spread(a.inner, parts_a, len(sizes)), _spread(b.inner, parts_b, len(sizes))
    if flags_a is not None and flags_b is not None and flags_a != flags_b:
        return None
    flags = flags_a if flags_a is not None else flags_b
    return tuple(sizes), flags, _moved(a, sizes, parts_a), _moved(b, sizes, parts_b)


def _spread(
    inner: tuple[bool, ...] | None, parts: list[list[int]], count: int
) -> tuple[bool, ...] | None:
    if inner is None:
        return None
    flags = [False] * count
    for flag, positions in zip(inner, parts, strict=True):
        for p in positions:
            flags[p] = flag
    return tuple(flags)


def _moved(
    group: Group, sizes: list[Dim], parts: list[list[int]], role: Role | None = None
) -> tuple[Member, ...]:
    """The group's members over finer axes, in another role if those are not all."""
    if role is None and tuple(sizes) == group.sizes:
        return group.members
    variables = domain.axis_names(sizes)
    mapping: dict[Atom, Dim] = {}
    for i, (size, positions) in enumerate(zip(group.sizes, parts, strict=True)):
        atom = ix.as_atom(ix.var(f"x{i}", size))
        target = domain.joined(sizes, variables, positions)
        if atom is not None and ix.as_atom(target) is not atom:
            mapping[atom] = target
    made, parts_of = [], {f"x{i}": positions for i, positions in enumerate(parts)}
    for member in group.members:
        pieces = [(p, a.reduced) for a in member.loop.axes for p in parts_of[a.name]]
        axes = tuple(Axis(f"x{p}", sizes[p], reduced) for p, reduced in sorted(pieces))
        loop = domain.rewrite(member.loop, mapping, axes)
        made.append(replace(member, loop=loop, role=role or member.role))
    return tuple(made)


def _rows_of(a: Group, b: Group) -> _Joined | None:
    """`b` maps over just the rows of `a`: it runs once per row, next to a's columns."""
    if a.inner is None or not any(a.inner):
        return None
    kept = [i for i, flag in enumerate(a.inner) if not flag]
    found = domain.refine([a.sizes[i] for i in kept], b.sizes)
    if found is None:
        return None
    fine, parts_kept, parts_b = found
    sizes: list[Dim] = []
    parts_a: list[list[int]] = []
    place: dict[int, int] = {}
    for i, flag in enumerate(a.inner):
        pieces = [None] if flag else parts_kept[kept.index(i)]
        positions = []
        for piece in pieces:
            if piece is not None:
                place[piece] = len(sizes)
            positions.append(len(sizes))
            sizes.append(a.sizes[i] if piece is None else fine[piece])
        parts_a.append(positions)
    inner = _spread(a.inner, parts_a, len(sizes))
    moved_b = _moved(b, sizes, [[place[p] for p in parts] for parts in parts_b], Role.ROW)
    return tuple(sizes), inner, _moved(a, sizes, parts_a), moved_b


class Fuser:
    """Merges groups greedily, most shared bytes first, keeping the graph of groups acyclic.

    Loops with more than `reach` calls between them are not fused: else the results of the later
    one would occupy memory from the time of the earlier one on.
    """

    def __init__(
        self,
        program: Program,
        reach: int | None = None,
        most_loops: int = 0,
        *,
        is_gpu: bool = False,
    ) -> None:
        self.program = program
        self.is_gpu = is_gpu
        self._reach = reach
        self._most_loops = most_loops  # in one kernel; 0: no limit
        self._num_calls: list[int] = []  # node number -> calls before it
        self.groups: dict[int, Group] = {}
        self.home: list[int] = []  # node number -> its group
        self.above: dict[int, int] = {}  # group -> bit set of nodes that must run before it
        self.inside: dict[int, int] = {}  # group -> bit set of its nodes
        self.needs: list[int] = []  # node number -> bit set of nodes it directly depends on
        self.refusals: list[Refusal] = []
        self._writers: dict[str, list[int]] = {}
        self._readers: dict[str, list[int]] = {}

    def run(self) -> None:
        calls = 0
        for number, node in enumerate(self.program.nodes):
            reads, writes = accesses(node)
            calls += isinstance(node, LibraryCall)
            self._num_calls.append(calls)
            self._enter(number, node, reads, writes)
            if isinstance(node, Loop):
                self._merge_with_neighbours(number, reads)
            for name in reads:
                self._readers.setdefault(name, []).append(number)
            for name in writes:
                self._writers.setdefault(name, []).append(number)

    def _enter(self, number: int, node: Node, reads: list[str], writes: list[str]) -> None:
        before = [n for name in (*reads, *writes) for n in self._writers.get(name, ())]
        before += [n for name in writes for n in self._readers.get(name, ())]
        needs = sum(1 << n for n in set(before))
        self.needs.append(needs)
        self.home.append(number)
        self.groups[number] = group_of(number, node)
        self.inside[number] = 1 << number
        self.above[number] = self._closure(needs)

    def _closure(self, needs: int) -> int:
        total = 0
        for group in {self.home[n] for n in bits(needs)}:
            total |= self.above[group] | self.inside[group]
        return total

    def _merge_with_neighbours(self, number: int, reads: list[str]) -> None:
        score: dict[int, int] = {}
        for name in reads:
            size = _bytes_of(self.program.buffers[name]) if name in self.program.buffers else 0
            near = self._writers.get(name, []) + self._readers.get(name, [])[-6:]
            for other in near:
                home = self.home[other]
                score[home] = score.get(home, 0) + size
        for candidate in sorted(score, key=lambda g: (-score[g], -g))[:8]:
            mine, theirs = self.home[number], self.home[candidate]
            if mine != theirs:
                self._try(theirs, mine)

    def _try(self, a: int, b: int) -> None:
        first, second = self.groups[a], self.groups[b]
        if first.is_fixed or second.is_fixed:
            return
        try:
            if self._is_far(first, second):
                raise CannotMerge("they are far apart and memory is limited")
            if 0 < self._most_loops < len(first.members) + len(second.members):
                raise CannotMerge(f"together they would be more than {self._most_loops} loops")
            if self._has_path_between(a, b):
                raise CannotMerge("another kernel must run between them")
            merged = self._merged(a, b)
        except CannotMerge as apart:
            if len(self.refusals) < _MOST_REFUSALS:
                names = [g.members[-1].loop.out for g in (first, second)]
                self.refusals.append(Refusal(names[0], names[1], str(apart)))
            return
        self._replace(a, b, merged)

    def _is_far(self, first: Group, second: Group) -> bool:
        if self._reach is None:
            return False
        calls = [self._num_calls[number] for number in (*first.nodes, *second.nodes)]
        return max(calls) - min(calls) > self._reach

    def _merged(self, a: int, b: int) -> Group:
        first, second = self.groups[a], self.groups[b]
        if self.above[a] & self.inside[b]:
            first, second = second, first
        try:
            return self._checked(merge(first, second))
        except CannotMerge:
            # A map may run over its axes in any order: try the one its producer was written in.
            for transposed in _transposed(first, second):
                try:
                    return self._checked(merge(first, transposed))
                except CannotMerge:
                    continue
            raise

    def _checked(self, merged: Group) -> Group:
        """The group, unless it stores single bytes far apart: a GPU moves 32 for each."""
        if not self.is_gpu:
            return merged
        inner = merged.inner or ()
        axes = [Axis(f"x{i}", size) for i, size in enumerate(merged.sizes)]
        found = quantised_axes(axes, merged.members)
        if found and any(inner):
            raise CannotMerge("an eight-bit result runs across the rows")
        if len(found) > 1:
            raise CannotMerge("eight-bit results run along different axes")
        return merged

    def _has_path_between(self, a: int, b: int) -> bool:
        for start, end in ((a, b), (b, a)):
            between = 0
            for node in self.groups[end].nodes:
                between |= self.needs[node]
            for group in {self.home[n] for n in bits(between)} - {start, end}:
                if self.above[group] & self.inside[start]:
                    return True
        return False

    def _replace(self, a: int, b: int, merged: Group) -> None:
        self.groups[a] = merged
        del self.groups[b]
        for node in merged.nodes:
            self.home[node] = a
        self.inside[a] |= self.inside.pop(b)
        self.above[a] = (self.above[a] | self.above.pop(b)) & ~self.inside[a]
        known = self.above[a] | self.inside[a]
        for group, above in self.above.items():
            if group != a and above & self.inside[a]:
                self.above[group] = above | known


def _transposed(first: Group, second: Group) -> list[Group]:
    """`second` with its axes in the order in which `first` stored what `second` reads."""
    if not second.is_all_maps or len(second.members) != 1:
        return []
    loop = second.members[0].loop
    made = {m.loop.out for m in first.members}
    orders = {
        domain.order_by(loop.axes, read.index) for read in loop.reads() if read.buffer in made
    }
    return [_group_over(second.nodes[0], loop, order) for order in orders if order != loop.axes]


def bits(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def accesses(node: Node) -> tuple[list[str], list[str]]:
    """Names of the buffers, carried values and sizes a node reads and writes."""
    if isinstance(node, LibraryCall):
        writes = node.makes() + list(node.mutates)
        return list(dict.fromkeys(node.reads())), list(dict.fromkeys(writes))
    names = [r.buffer for r in node.reads()]
    dims = [a.size for a in node.axes] + [node.index] + [r.index for r in node.reads()]
    return list(dict.fromkeys(names + sizes_from_data(dims))), [node.out]


def _bytes_of(buffer: Buffer) -> int:
    count = static_product(buffer.shape)
    return (1 << 20 if count is None else count) * buffer.dtype.num_bytes
