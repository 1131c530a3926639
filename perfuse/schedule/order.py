"""The order of groups: the program's, or one that holds less memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from perfuse.ir.program import ARGUMENTS, Program
from perfuse.schedule.arena import output_buffers
from perfuse.schedule.fuse import Fuser, accesses, bits
from perfuse.schedule.lifetimes import buffer_bytes

Rank = Callable[[int], tuple[int, int]]


def program_order(fuser: Fuser) -> list[int]:
    """Groups in an order that respects what each needs, earliest nodes first."""
    return _ordered(fuser, _Needs(fuser), lambda home: (0, home))


def frugal_order(fuser: Fuser, program: Program) -> list[int]:
    """The program's order, but groups that free at least what they allocate run early."""
    held = _Held(fuser, program)
    return _ordered(fuser, _Needs(fuser), held.rank, held.run)


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
        for home, group in fuser.groups.items():
            both = [accesses(program.nodes[number]) for number in group.nodes]
            reads = {name for names, _ in both for name in names}
            makes = {name for _, names in both for name in names}
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
