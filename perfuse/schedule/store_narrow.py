"""Values stored in small floats: half the traffic, and one rounding for all who read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType
from perfuse.ir.program import (
    Buffer,
    BufferKind,
    LibraryCall,
    Loop,
    LoopKind,
    Node,
    Program,
)
from perfuse.schedule.arena import output_buffers, touched
from perfuse.schedule.fuse import accesses
from perfuse.schedule.plan import Kernel, Member, Role

# Extremes are elements, which are rounded already where their extreme is.
_SUMS = (LoopKind.SUM, LoopKind.PROD)


def store_as_rounded(program: Program) -> Program:
    """Store narrow what every load widens anyway (`half_result.float()`)."""
    seen_outside = output_buffers(program)
    writers: dict[str, list[Node]] = {}
    for node in program.nodes:
        if isinstance(node, LibraryCall):
            seen_outside |= touched(node)
        for name in accesses(node)[1]:
            writers.setdefault(name, []).append(node)
    buffers = dict(program.buffers)
    for name in writers.keys() & buffers.keys():  # a call's results may have none (complex, state)
        buffer, nodes = buffers[name], writers[name]
        kind = _rounded_kind(nodes)
        if kind is not None and buffer.kind == BufferKind.TEMP and name not in seen_outside:
            if kind.compute is buffer.dtype:
                buffers[name] = replace(buffer, dtype=kind)
    return program if buffers == program.buffers else replace(program, buffers=buffers)


def keep_extremes_wide(program: Program) -> Program:
    """Store maxima and minima of small floats wide where only kernels read them.

    The elements need not be rounded where another kernel compares them with the largest one, or
    subtracts it. Rounded itself, it would differ from all of them.
    """
    seen_outside = output_buffers(program)
    for node in program.nodes:
        if isinstance(node, LibraryCall):
            seen_outside |= touched(node)
    buffers = dict(program.buffers)
    for node in program.nodes:
        if isinstance(node, Loop) and node.kind in (LoopKind.MAX, LoopKind.MIN):
            buffer = buffers[node.out]
            is_own = buffer.kind == BufferKind.TEMP and node.out not in seen_outside
            if is_own and buffer.dtype.is_narrow_float:
                buffers[node.out] = replace(buffer, dtype=buffer.dtype.compute)
    return program if buffers == program.buffers else replace(program, buffers=buffers)


def _rounded_kind(writers: list[Node]) -> DType | None:
    """The type that everything written was rounded to, if it is one."""
    kinds = set()
    for node in writers:
        is_rounded = isinstance(node, Loop) and node.is_map and node.value.op == "round_to"
        kinds.add(node.value.attr if is_rounded and isinstance(node, Loop) else None)
    return kinds.pop() if len(kinds) == 1 else None


def rounded_as_stored(kernel: Kernel, buffers: Mapping[str, Buffer]) -> tuple[Member, ...]:
    """The members, with values that go to memory rounded for those who read them on the way too.

    What another sweep, kernel or graph reads is rounded. The mean of values that are not, taken
    from rounded ones, leaves the rounding of them all: as much as the deviation itself, where a
    row is nearly constant. Sums of rows are rounded by their readers.
    """
    read = {load.buffer for member in kernel.members for load in member.loop.reads()}
    seen = kernel.stored & read
    sums = {m.loop.out for m in kernel.members if m.loop.kind in _SUMS} & seen
    sums = {name for name in sums if buffers[name].dtype.is_narrow_float}

    def as_in_memory(load: ex.Expr) -> ex.Expr:
        return ex.round_to(load, buffers[load.buffer].dtype) if load.buffer in sums else load

    change = ex.Substitution({}, as_in_memory)

    def rounded(member: Member) -> Member:
        loop = member.loop
        value = change(loop.value) if sums else loop.value
        if loop.is_map and member.role in (Role.FULL, Role.ROW) and loop.out in seen:
            value = ex.round_to(value, buffers[loop.out].dtype)
        return member if value is loop.value else replace(member, loop=replace(loop, value=value))

    return tuple(map(rounded, kernel.members))
