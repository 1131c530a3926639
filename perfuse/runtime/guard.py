"""Memory that exposes errors: poisoned before it is written, and checked around its buffers.

With `verify="memory"` a host program allocates its temporaries and results here. A read of a value
that was never written gives NaN; a write outside the buffers of a step is reported with the step. A
program takes a new arena for every call, at another address each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perfuse.codegen.host.source import GuardRow, HostSource
from perfuse.errors import MemoryFault
from perfuse.runtime.host_names import memory_of

UNWRITTEN = 0xFF  # NaN in every floating-point format, and the content of guard bands
_UNWRITTEN_INTEGER = 0xA5
_UNWRITTEN_BOOL = 1  # any other number would not be a bool
BAND = 256  # bytes before and after a buffer that nothing may write to
SLACK = 1024  # bytes by which arenas are larger, for a start anywhere in them
_WATCHED_WHOLE = 1 << 22  # larger arenas are checked only near the buffers in use
_NEAR = 1 << 12
_RECENT = 8  # separate tensors that are checked after every turn; all of them at the end

_steps = itertools.count()


def next_start() -> int:
    """The start of the next arena, in bytes: a multiple of 16, which is all kernels may expect."""
    return 16 * (next(_steps) * 37 % 61 + 1)


def poison(memory: torch.Tensor, dtype: torch.dtype) -> None:
    """Fill bytes with a value of this type that no program computes."""
    value = UNWRITTEN if dtype.is_floating_point or dtype.is_complex else _UNWRITTEN_INTEGER
    memory.fill_(_UNWRITTEN_BOOL if dtype is torch.bool else value)


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor in the middle of memory of its own."""

    name: str
    memory: torch.Tensor  # bytes, bands included
    start: int
    end: int
    address: int


class GuardLayout:
    """The arena of a program turn by turn."""

    def __init__(self, host: HostSource, unit: int) -> None:
        self.rows = host.guards
        self.num_bytes = host.arena_bytes
        self.unit = unit  # what the address of a tensor is a multiple of, besides its elements
        self._outside: dict[int, list[tuple[int, int]]] = {}

    def born(self, turn: int) -> list[GuardRow]:
        """Buffers written for the first time at offsets that nothing else occupies in that turn."""
        live = self.live(turn)
        new = [row for row in live if row.first == turn]
        return [row for row in new if not any(_overlap(row, r) for r in live if r is not row)]

    def done(self, turn: int) -> list[tuple[int, int]]:
        """Bytes used for the last time, less those that a later kernel of that turn has reused."""
        live = self.live(turn)
        kept = [(row.offset, row.offset + row.num_bytes) for row in live if row.last > turn]
        found = []
        for row in live:
            if row.last == turn:
                end = row.offset + row.num_bytes
                inside = [(max(a, row.offset), b) for a, b in sorted(kept) if b > row.offset]
                found += [(max(a, row.offset), min(b, end)) for a, b in _gaps(inside, end)]
        return [(start, end) for start, end in found if start < end]

    def live(self, turn: int) -> list[GuardRow]:
        return [row for row in self.rows if row.first <= turn <= row.last]

    def dead(self, turn: int) -> list[tuple[int, int]]:
        """Bytes that belong to no buffer in use."""
        if turn not in self._outside:
            spans = sorted((r.offset, r.offset + r.num_bytes) for r in self.live(turn))
            self._outside[turn] = list(self._near(_gaps(spans, self.num_bytes)))
        return self._outside[turn]

    def _near(self, gaps: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
        for start, end in gaps:
            if self.num_bytes <= _WATCHED_WHOLE or end - start <= 2 * _NEAR:
                yield start, end
            else:
                yield from ((start, start + _NEAR), (end - _NEAR, end))

    def nearest(self, turn: int, offset: int) -> str:
        """Describe the position of a byte of the arena."""
        rows = self.live(turn) or list(self.rows)
        if not rows:
            return f"byte {offset} of the arena"
        row = min(rows, key=lambda r: _distance(r, offset))
        return _place(row.name, offset - row.offset, row.num_bytes)


def _overlap(a: GuardRow, b: GuardRow) -> bool:
    return a.offset < b.offset + b.num_bytes and b.offset < a.offset + a.num_bytes


def _distance(row: GuardRow, offset: int) -> int:
    return max(row.offset - offset, offset - row.offset - row.num_bytes + 1, 0)


def _gaps(spans: Sequence[tuple[int, int]], total: int) -> Iterable[tuple[int, int]]:
    done = 0
    for start, end in spans:
        if start > done:
            yield done, start
        done = max(done, end)
    if total > done:
        yield done, total


def _place(name: str, offset: int, num_bytes: int) -> str:
    if offset < 0:
        return f"{-offset} bytes before {name}"
    return f"{offset - num_bytes} bytes after the end of {name} ({num_bytes} bytes)"


class Guard:
    """The memory of one call."""

    def __init__(self, layout: GuardLayout, arena: torch.Tensor) -> None:
        self.layout = layout
        self.arena = arena.fill_(UNWRITTEN)  # bytes, from the start of the program's arena
        self.made: dict[int, _Made] = {}

    def empty(
        self, name: str, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """As torch.empty_strided, but poisoned, and at an offset in guarded memory."""
        steps = zip(shape, strides, strict=True)
        span = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in steps)
        unit = max(self.layout.unit, 2 * dtype.itemsize)  # real tensors may be viewed as complex
        start = BAND + unit * (len(self.made) * 5 % 8)
        end = start + span * dtype.itemsize
        # Zero bytes are room for an element all the same: an empty tensor has an address too.
        total = end + BAND + -end % 16
        memory = torch.empty(total, dtype=torch.uint8, device=self.arena.device).fill_(UNWRITTEN)
        poison(memory[start:end], dtype)
        usable = memory[start : start + (total - start) // dtype.itemsize * dtype.itemsize]
        whole = usable.view(dtype)
        tensor = whole.as_strided(shape, strides, whole.storage_offset())
        if span:
            self.made[tensor.data_ptr()] = _Made(name, memory, start, end, tensor.data_ptr())
        return tensor

    def before(self, turn: int) -> None:
        """Poison the buffers that this turn writes first."""
        for row in self.layout.born(turn):
            kind: torch.dtype = getattr(torch, row.dtype.removeprefix("torch."))
            poison(self.arena[row.offset : row.offset + row.num_bytes], kind)

    def after(self, turn: int, what: str) -> None:
        """Raise if a turn wrote out of bounds, and poison what is no longer needed."""
        for start, end in self.layout.dead(turn):
            offset = _first_written(self.arena[start:end])
            if offset is not None:
                raise MemoryFault(what, self.layout.nearest(turn, start + offset))
        for made in itertools.islice(reversed(self.made.values()), _RECENT):
            self._check(made, what)
        for start, end in self.layout.done(turn):
            self.arena[start:end].fill_(UNWRITTEN)

    def finish(self) -> None:
        """At the end, check every tensor that was allocated."""
        for made in self.made.values():
            self._check(made, "a step of the program")

    def _check(self, made: _Made, what: str) -> None:
        for start, end in ((0, made.start), (made.end, made.memory.numel())):
            offset = _first_written(made.memory[start:end])
            if offset is not None:
                place = _place(made.name, start + offset - made.start, made.end - made.start)
                raise MemoryFault(what, place)

    def result(self, tensor: Any) -> Any:
        """A plain tensor with the same contents if it was allocated here; else the tensor itself.
        The address of an empty tensor does not show where it was allocated.
        """
        if tensor is None or (tensor.numel() and tensor.data_ptr() not in self.made):
            return tensor
        plain = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        memory_of(plain).copy_(memory_of(tensor))
        return plain


def _first_written(memory: torch.Tensor) -> int | None:
    written = memory != UNWRITTEN
    return int(written.nonzero()[0]) if bool(written.any()) else None
