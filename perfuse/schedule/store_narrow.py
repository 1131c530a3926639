"""A temporary of rounded values is stored in the type they were rounded to: half the traffic."""

from __future__ import annotations

from dataclasses import replace

from perfuse.ir.dtype import DType
from perfuse.ir.program import BufferKind, LibraryCall, Loop, Node, Program
from perfuse.schedule.arena import output_buffers, touched
from perfuse.schedule.fuse import accesses


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


def _rounded_kind(writers: list[Node]) -> DType | None:
    """The type that everything written was rounded to, if it is one."""
    kinds = set()
    for node in writers:
        is_rounded = isinstance(node, Loop) and node.is_map and node.value.op == "round_to"
        kinds.add(node.value.attr if is_rounded and isinstance(node, Loop) else None)
    return kinds.pop() if len(kinds) == 1 else None
