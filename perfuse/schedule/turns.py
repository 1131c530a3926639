"""`MemoryPlan`: when each buffer of a plan gets memory, where from, and when it is given back.

A host program works in *turns*: one library call, or kernels in a row that are launched together.
Before a turn it allocates what the steps of the turn need, and after it frees what no later turn
needs. `allocate.py` decides this, `verify_memory.py` checks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim


@dataclass(frozen=True, slots=True)
class Scratch:
    """Scratch that a kernel needs besides the program's buffers; the code generator names it.

    Without `fill` its contents are undefined at each call. With `fill` it is filled before the
    launch that lists it. With `is_kept` it is filled once, when it is made, and then lives as long
    as the program: a kernel that restores its contents (a counter of finished blocks, reset by
    the last one) needs no fill. Persistent scratch is never shared by launches that may overlap.
    """

    name: str
    dtype: DType
    size: Dim  # in elements; known now if it is kept
    fill: int | float | None = None
    is_kept: bool = False

    @property
    def num_bytes(self) -> int | None:
        """Its size where that is known now."""
        return self.size * self.dtype.num_bytes if isinstance(self.size, int) else None


class MemorySource(Enum):
    """Where the memory of a buffer, or of scratch, comes from."""

    NEW = "new"  # the allocator
    CALL = "call"  # the library call that returns it
    REUSED = "reused"  # the buffer `of`, which no later step needs
    ARENA = "arena"  # `offset` bytes into the arena of the frame
    PART = "part"  # scratch: `offset` bytes into the piece `of`


@dataclass(frozen=True, slots=True)
class Allocation:
    """The memory of one buffer or of one piece of scratch."""

    name: str
    source: MemorySource
    num_bytes: int | None = None  # where it is known now
    of: str = ""
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """Steps that the host runs together; `allocated` has what each of them adds."""

    first: int  # the number of its first step
    allocated: tuple[tuple[Allocation, ...], ...]
    freed: tuple[str, ...]  # when it has run; what is in the arena goes with the arena

    @property
    def numbers(self) -> range:
        """The numbers of its steps."""
        return range(self.first, self.first + len(self.allocated))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A plan's memory, turn by turn."""

    turns: tuple[Turn, ...] = ()
    arena_bytes: int = 0  # of the plan's places, and of scratch behind them
    freed_at_entry: tuple[str, ...] = ()  # donated inputs that no step reads
    at_exit: tuple[Allocation, ...] = ()  # results that no step writes: they have no elements

    def allocations(self) -> Iterator[Allocation]:
        """The allocations of the steps, in order."""
        for turn in self.turns:
            for added in turn.allocated:
                yield from added
