"""The order of groups: the program's, or one that holds less memory."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from perfuse.ir.program import ARGUMENTS, LibraryCall, Matmul, Node, Program
from perfuse.schedule.arena import output_buffers
from perfuse.schedule.fuse import Fuser, accesses, bits
from perfuse.schedule.lifetimes import buffer_bytes

# A call runs late where its results are this many times the size of the operands kept for it.
_LATE_RATIO = 4

Rank = Callable[[int], tuple[int, int]]


def program_order(fuser: Fuser) -> list[int]:
    """Groups in an order that respects what each needs, earliest nodes first."""
    return _ordered(fuser, _Needs(fuser), lambda home: (0, home))


def frugal_order(fuser: Fuser, program: Program) -> list[int]:
    """The program's order, but groups that free at least what they allocate run early."""
    held = _Held(fuser, program)
    return _ordered(fuser, _Needs(fuser), held.rank, held.run)


def late_results(fuser: Fuser, program: Program, order: list[int]) -> list[int]:
    """The order with calls last that make large results of small operands.

    The gradient of a weight, for example, for a batch of few rows: nothing reads it, and until
    the end of a backward the memory it takes serves other values.
    """
    late = set(_late_calls(fuser, program, order))
    return [home for home in order if home not in late] + [h for h in order if h in late]


def _late_calls(fuser: Fuser, program: Program, order: list[int]) -> Iterator[int]:
    sizes, leaving = _freeable_bytes(program), output_buffers(program)
    every = {home: _accesses(fuser, program, home) for home in order}
    users = Counter(name for reads, makes in every.values() for name in reads | makes)
    last_write = {name: number for number, h in enumerate(order) for name in every[h][1]}
    for number, home in enumerate(order):
        node, (reads, makes) = program.nodes[fuser.groups[home].nodes[0]], every[home]
        if not _is_pure(node) or not makes <= leaving or any(users[n] > 1 for n in makes):
            continue
        if any(last_write.get(name, number) > number for name in reads):
            continue  # an operand that is overwritten, or updated in place, after it is read
        made, kept = (sum(sizes.get(n, 0) for n in names) for names in (makes, reads - leaving))
        if made >= _LATE_RATIO * kept:
            yield home


def _is_pure(node: Node) -> bool:
    """A matmul, or a convolution's gradients: calls that do nothing but make new memory."""
    if not isinstance(node, LibraryCall) or node.mutates:
        return False
    return isinstance(node, Matmul) or node.op == "aten.convolution_backward.default"


def _accesses(fuser: Fuser, program: Program, home: int) -> tuple[set[str], set[str]]:
    """The buffers that a group reads, and those that it makes or writes."""
    both = [accesses(program.nodes[number]) for number in fuser.groups[home].nodes]
    return {n for names, _ in both for n in names}, {n for _, names in both for n in names}


class _Needs:
    """Which groups wait for which."""

    def __init__(self, fuser: Fuser) -> None:
        self.waiting: dict[int, set[int]] = {}
        self.users: dict[int, list[int]] = {}
        for home, group in fuser.groups.items():
            needs = {fuser.home[n] for node in group.nodes for n in bits(fuser.needs[node])}
            needs.discard(home)
            self.waiting[home] = needs
            for need in needs:
                self.users.setdefault(need, []).append(home)


def _ordered(
    fuser: Fuser, needs: _Needs, rank: Rank, run: Callable[[int], set[int]] | None = None
) -> list[int]:
    """Run the ready group of lowest rank; `run` returns the groups whose rank this changes."""
    ready = {home for home, waits in needs.waiting.items() if not waits}
    heap = [(rank(home), home) for home in ready]
    heapq.heapify(heap)
    order = []
    while heap:
        ranked, home = heapq.heappop(heap)
        if home not in ready or ranked != rank(home):
            continue  # an entry from before its rank changed
        ready.discard(home)
        order.append(home)
        changed = run(home) if run is not None else set()
        for user in needs.users.get(home, ()):
            needs.waiting[user].discard(home)
            if not needs.waiting[user]:
                ready.add(user)
                changed.add(user)
        for other in changed & ready:
            heapq.heappush(heap, (rank(other), other))
    assert len(order) == len(fuser.groups), "fusion made a cycle"
    return order


class _Held:
    """The bytes that running a group adds: its results, less what it is the last to read."""

    def __init__(self, fuser: Fuser, program: Program) -> None:
        self._reads: dict[int, set[str]] = {}
        self._makes: dict[int, set[str]] = {}
        self._readers: dict[str, set[int]] = {}
        self._bytes = _freeable_bytes(program)
        self._leaving = output_buffers(program)
        for home in fuser.groups:
            reads, makes = _accesses(fuser, program, home)
            self._reads[home], self._makes[home] = reads - makes, makes
            for name in reads:
                self._readers.setdefault(name, set()).add(home)

    def rank(self, home: int) -> tuple[int, int]:
        added = sum(self._made_bytes(name, home) for name in self._makes[home])
        freed = sum(
            self._bytes.get(name, 0)
            for name in self._reads[home]
            if name not in self._leaving and self._readers[name] == {home}
        )
        return int(added > freed), home

    def _made_bytes(self, name: str, home: int) -> int:
        """A value that its own group alone reads lives in registers."""
        leaves = name in self._leaving or self._readers.get(name, set()) != {home}
        return self._bytes.get(name, 0) if leaves else 0

    def run(self, home: int) -> set[int]:
        """Record that the group has run; return groups that now are last readers."""
        changed: set[int] = set()
        for name in self._reads[home]:
            left = self._readers[name]
            left.discard(home)
            if len(left) == 1:
                changed |= left
        return changed


def _freeable_bytes(program: Program) -> Mapping[str, int]:
    """The size of each buffer whose memory comes or goes with the program."""
    buffers, given = program.buffers.values(), set(program.donated)
    counted = [b for b in buffers if b.kind not in ARGUMENTS or b.name in given]
    return {b.name: buffer_bytes(b, program.hints) for b in counted}
