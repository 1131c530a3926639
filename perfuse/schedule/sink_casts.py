"""A reduction whose result is only converted or copied writes the copy: one loop fewer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.program import BufferKind, Loop, Program
from perfuse.schedule.arena import output_buffers
from perfuse.schedule.fuse import accesses


def narrow_reductions(program: Program) -> Program:
    """Sums in float32 that are rounded once and stored, amax that fills the caller's buffer."""
    readers, writers = _accesses(program)
    leaving = output_buffers(program)
    nodes = list(program.nodes)
    gone: set[int] = set()
    for number, node in enumerate(program.nodes):
        if not isinstance(node, Loop) or not node.is_reduction or node.kind.is_position:
            continue
        users = readers.get(node.out, [])
        is_temporary = program.buffers[node.out].kind == BufferKind.TEMP
        if len(users) != 1 or node.out in leaving or not is_temporary:
            continue
        if writers[node.out] > 1:  # an update of some elements, which the copy is to show
            continue
        user = program.nodes[users[0]]
        merged = _merged(node, user, program) if isinstance(user, Loop) else None
        if merged is not None and not _is_looked_at(program, number, users[0]):
            nodes[number] = merged
            gone.add(users[0])
    if not gone:
        return program
    return replace(program, nodes=tuple(n for i, n in enumerate(nodes) if i not in gone))


def _accesses(program: Program) -> tuple[dict[str, list[int]], Counter[str]]:
    """The nodes that read each buffer, and how many write it."""
    readers: dict[str, list[int]] = {}
    writers: Counter[str] = Counter()
    for number, node in enumerate(program.nodes):
        reads, writes = accesses(node)
        for name in reads:
            readers.setdefault(name, []).append(number)
        writers.update(writes)
    return readers, writers


def _is_looked_at(program: Program, first: int, last: int) -> bool:
    """Whether writing the copy's buffer at `first` instead of at `last` would be noticed.

    A loop that reads it would see a value that was not rounded, if it shares a kernel with the
    reduction; anything between the two would see it too early.
    """
    copy = program.nodes[last]
    assert isinstance(copy, Loop)
    for number, node in enumerate(program.nodes):
        reads, writes = accesses(node)
        if copy.out in reads and (isinstance(node, Loop) or first <= number <= last):
            return True
        if copy.out in writes and number != last and number >= first:
            return True
    return False


def _merged(node: Loop, copy: Loop, program: Program) -> Loop | None:
    """The reduction storing to the copy's place; None if the copy does more than convert."""
    value, stored = copy.value, program.buffers[copy.out].dtype
    while _is_done_by_storing(value, stored):
        value = value.args[0]
    kept = node.kept
    is_copy = copy.is_map and value.op == "load" and not value.args
    if not is_copy or [a.size for a in copy.axes] != [a.size for a in kept]:
        return None
    if stored.compute is not copy.value.dtype:
        return None
    pairs = zip(copy.axes, kept, strict=True)
    mapping = {t.atom: ix.var(o.name, o.size) for t, o in pairs if t.atom is not None}
    change = ex.Substitution(mapping)
    if change.index(value.index) is not node.index:
        return None
    return replace(node, out=copy.out, index=change.index(copy.index))


def _is_done_by_storing(value: ex.Expr, stored: DType) -> bool:
    """Whether a value is converted between floats, to no fewer bits than are stored."""
    if value.op == "round_to":
        return value.attr is stored
    if value.op != "cast" or not value.args[0].dtype.is_float:
        return False
    return value.dtype.is_float and value.dtype.num_bytes >= stored.num_bytes
