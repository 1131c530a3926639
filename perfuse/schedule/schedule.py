"""`schedule`: a Program's loops fused into kernels and put in order."""

from __future__ import annotations

import heapq
from dataclasses import replace

from perfuse.context import Context
from perfuse.ir.expr import SCALAR_OPS, Expr, walk
from perfuse.ir.program import Extern, Loop, Program
from perfuse.schedule import memory, shape
from perfuse.schedule.fuse import Fuser, Group, accesses
from perfuse.schedule.plan import Kernel, Plan, Step, static_product


def schedule(program: Program, context: Context) -> Plan:
    """Fuse, order, and place: what comes out is ready to be spelled."""
    program = _without_dead_loops(program)
    fuser = Fuser(program)
    fuser.run()
    order = _ordered(fuser)
    steps: list[Step] = []
    outside = _outside_uses(program, fuser)
    for group in order:
        if group.members:
            home = fuser.home[group.nodes[0]]
            steps.append(_kernel(f"k{len(steps)}", group, home, outside, program))
        else:
            node = program.nodes[group.nodes[0]]
            assert isinstance(node, Extern)
            steps.append(node)
    places, arena_bytes = memory.place(program, tuple(steps))
    context.counters.inc("schedule.loops", sum(isinstance(n, Loop) for n in program.nodes))
    context.counters.inc("schedule.kernels", sum(isinstance(s, Kernel) for s in steps))
    return Plan(program, tuple(steps), tuple(fuser.refusals), places, arena_bytes)


def _without_dead_loops(program: Program) -> Program:
    """Drop loops whose results nobody reads."""
    needed = memory.output_buffers(program)
    needed |= {n for n, b in program.buffers.items() if b.role == "input"}
    kept = []
    for node in reversed(program.nodes):
        if isinstance(node, Loop) and node.out not in needed:
            continue
        reads, _ = accesses(node)
        needed.update(reads)
        kept.append(node)
    if len(kept) == len(program.nodes):
        return program
    return replace(program, nodes=tuple(reversed(kept)))


def _ordered(fuser: Fuser) -> list[Group]:
    """Groups in an order that respects what each needs, earliest nodes first."""
    waiting: dict[int, set[int]] = {}
    users: dict[int, list[int]] = {}
    for home, group in fuser.groups.items():
        needs: set[int] = set()
        for node in group.nodes:
            mask = fuser.needs[node]
            while mask:
                low = mask & -mask
                needs.add(fuser.home[low.bit_length() - 1])
                mask ^= low
        needs.discard(home)
        waiting[home] = needs
        for need in needs:
            users.setdefault(need, []).append(home)
    ready = [home for home, needs in waiting.items() if not needs]
    heapq.heapify(ready)
    order = []
    while ready:
        home = heapq.heappop(ready)
        order.append(fuser.groups[home])
        for user in users.get(home, ()):
            waiting[user].discard(home)
            if not waiting[user]:
                heapq.heappush(ready, user)
    assert len(order) == len(fuser.groups), "fusion made a cycle"
    return order


def _outside_uses(program: Program, fuser: Fuser) -> dict[str, set[int]]:
    """For each buffer the groups that touch it; -1 stands for the world outside."""
    uses: dict[str, set[int]] = {}
    for number, node in enumerate(program.nodes):
        reads, _ = accesses(node)
        for name in reads:
            uses.setdefault(name, set()).add(fuser.home[number])
    for name in memory.output_buffers(program):
        uses.setdefault(name, set()).add(-1)
    return uses


def _kernel(
    name: str, group: Group, home: int, uses: dict[str, set[int]], program: Program
) -> Kernel:
    axes, members = shape.collapse(shape.axes_of(group), group.members)
    members = shape.stage(members)
    stored = set()
    several: dict[str, int] = {}
    for m in members:
        several[m.loop.out] = several.get(m.loop.out, 0) + 1
    for m in members:
        out = m.loop.out
        is_used_elsewhere = bool(uses.get(out, set()) - {home})
        if is_used_elsewhere or program.buffers[out].role != "temp" or several[out] > 1:
            stored.add(out)
        elif m.role in ("outer", "all", "scatter", "scan"):
            stored.add(out)
    made = Kernel(name, axes, members, frozenset(stored))
    return replace(
        made,
        num_bytes=memory.kernel_bytes(made, program.buffers),
        num_flops=_flops(made),
    )


def _flops(kernel: Kernel) -> int:
    total = 0
    seen: set[Expr] = set()
    for m in kernel.members:
        count = static_product([a.size for a in m.loop.axes]) or 0
        ops = sum(e.op in SCALAR_OPS for e in walk(m.loop.value, seen))
        total += count * (ops + m.loop.is_reduction)
    return total
