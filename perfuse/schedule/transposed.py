"""Accesses that are contiguous along another axis than the last: transposed reads and copies.

A GPU moves sectors of 32 bytes. An FP8 value that is stored alone, in a kernel whose lanes run
along the other axis, costs a whole sector, so kernels with such copies have tiles of two axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from perfuse.ir import index as ix
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis
from perfuse.schedule.plan import Kernel, Member


def transposed_axis(kernel: Kernel) -> Axis | None:
    """The axis that some load runs along contiguously while the last axis does not."""
    return transposed_axis_of(kernel.axes, kernel.members)


def transposed_axis_of(axes: Sequence[Axis], members: Sequence[Member]) -> Axis | None:
    """That axis of a kernel with these axes and members."""
    indices = (read.index for member in members for read in member.loop.reads())
    return next(_contiguous_axes(axes, indices), None)


def quantised_axes(axes: Sequence[Axis], members: Sequence[Member]) -> set[Axis]:
    """The axes that results of eight-bit floats, or what they are made of, run along instead."""
    small: set[str] = set()
    indices: list[Dim] = []
    for member in members:
        loop, value = member.loop, member.loop.value
        is_copy = value.op == "load" and value.buffer in small
        if is_copy or (value.op == "round_to" and value.attr.is_float8):
            small.add(loop.out)
            indices += [loop.index, *(read.index for read in loop.reads())]
    return set(_contiguous_axes(axes, indices))


def tall_axis(kernel: Kernel) -> Axis | None:
    """The axis that tiles of a GPU kernel have beside the last one; None: one axis is enough."""
    quantised, read = quantised_axes(kernel.axes, kernel.members), transposed_axis(kernel)
    if not quantised or read in quantised:
        return read
    return min(quantised, key=lambda axis: axis.name)


def _contiguous_axes(axes: Sequence[Axis], indices: Iterable[Dim]) -> Iterator[Axis]:
    """For each index that does not run along the last axis, the axis that it does run along."""
    *rest, last = axes or (None,)
    if last is None or last.atom is None:
        return
    for index in indices:
        if ix.coefficient_of(index, last.atom) in (0, 1, None):
            continue
        for axis in rest:
            if axis is not None and axis.atom and ix.coefficient_of(index, axis.atom) == 1:
                yield axis
