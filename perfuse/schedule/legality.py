"""Data flow that is legal inside one kernel: the same element, or the same row, in order."""

from __future__ import annotations

from perfuse.ir.expr import Expr
from perfuse.schedule.plan import Member, Role


class CannotMerge(Exception):
    """Two groups cannot merge; the message is the reason."""


def check_flow(writing: tuple[Member, ...], reading: tuple[Member, ...]) -> None:
    """Check that what one group reads of the other's results is available when it runs."""
    writers: dict[str, list[Member]] = {}
    for m in writing:
        writers.setdefault(m.loop.out, []).append(m)
    for reader in reading:
        for read in reader.loop.reads():
            for writer in writers.get(read.buffer, ()):
                _check_read(writer, reader, read)
        if reader.loop.out in writers:
            raise CannotMerge(f"both write {reader.loop.out}")


def check_overwriting(members: tuple[Member, ...]) -> None:
    """A buffer changes at most once while a kernel looks at it: before, or after, not both."""
    readers: dict[str, list[int]] = {}
    for m in members:
        for read in m.loop.reads():
            readers.setdefault(read.buffer, []).append(m.number)
    for m in members:
        numbers = readers.get(m.loop.out)
        if numbers and min(numbers) <= m.number < max(numbers):
            raise CannotMerge(f"{m.loop.out} is read before and after it is overwritten")


def _check_read(writer: Member, reader: Member, read: Expr) -> None:
    name = read.buffer
    if read.index is not writer.loop.index:
        raise CannotMerge(f"{reader.loop.out} reads {name} at a different index than it is written")
    if writer.number > reader.number:
        # The reader needs the old value: it must read it before the overwriting loop runs.
        if not (writer.role == reader.role == Role.FULL):
            raise CannotMerge(f"{name} is overwritten in a loop of different shape")
        return
    if writer.role in (Role.OUTER, Role.ALL):
        raise CannotMerge(f"{name} is complete only after all rows")
    if writer.role == Role.FULL and reader.role == Role.ROW:
        raise CannotMerge(f"{reader.loop.out} reads columns of {name} once per row")
