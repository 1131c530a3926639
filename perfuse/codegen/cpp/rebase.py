"""Kernels that differ only in the offset of their reads become equal: one function for all.

A recurrence of thousands of steps, each on the next column of an input, is a hundred kernels that
differ in the constant offset of their reads. The constant moves into the pointer they are called
with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.schedule.plan import Kernel


def rebased(kernel: Kernel, over: Mapping[str, str]) -> tuple[Kernel, dict[str, int]]:
    """The kernel with reads counted from the first constant, and that constant of each buffer.

    Only for buffers that are only read: written ones are distinguished by the index of the write.
    """
    written = {m.loop.out for m in kernel.members} | set(over) | set(over.values())
    starts: dict[str, int] = {}
    for member in kernel.members:
        for read in member.loop.reads():
            name, index = read.attr
            starts[name] = min(starts.get(name, _constant(index)), _constant(index))
    # A negative one is of a read under a mask: the pointer would precede the buffer.
    starts = {n: start for n, start in starts.items() if start > 0 and n not in written}
    if not starts:
        return kernel, starts

    def moved(read: Expr) -> Expr:
        name, index = read.attr
        return ex.load_at(read, ix.add(index, -starts[name])) if name in starts else read

    change, members = ex.Substitution({}, moved), []
    for m in kernel.members:
        value, index = change(m.loop.value), change.index(m.loop.index)
        members.append(replace(m, loop=replace(m.loop, value=value, index=index)))
    return replace(kernel, members=tuple(members)), starts


def _constant(index: Dim) -> int:
    return index if isinstance(index, int) else index.const
