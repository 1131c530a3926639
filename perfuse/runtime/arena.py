"""Arenas: memory for the temporaries of a call, which the programs of a process use in turn.

A call has its arena to itself. Between calls it serves every program of about its size, so that
the graphs of a model, such as a forward and its backward, keep the memory of one of them, not of
all. Calls that overlap, in threads or inside of each other, have different arenas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet, ref

import torch

from perfuse.forking import ForkLock

# Smaller arenas are not worth sharing.
LEAST_SHARED_BYTES = 1 << 16
# A program takes no arena that is larger than it needs by more: it might be the last to hold it.
_MOST_RATIO = 8


class Arena:
    """Memory, and whether a call uses it."""

    __slots__ = ("__weakref__", "_free", "frames", "is_outgrown", "memory", "num_bytes")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.num_bytes = memory.numel()
        self.is_outgrown = False  # a larger one serves the same programs
        self.frames: WeakSet[Any] = WeakSet()  # whose windows hold its memory
        self._free: list[None] = []  # has an item while no call uses it: popping is atomic

    def take(self) -> bool:
        """Reserve it for a call, unless another call has it."""
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def leave(self) -> None:
        """End the call that has it."""
        self._free.append(None)

    def outgrow(self) -> None:
        """Release its memory, unless a call uses it: frames over it are not used again."""
        self.is_outgrown = True
        if self.take():
            for frame in self.frames:
                frame.windows = []
            self.memory = self.memory.new_empty(0)


class Arenas:
    """Every arena that programs share, as long as a frame holds it."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._all: tuple[ref[Arena], ...] = ()

    def taken(self, num_bytes: int, empty: Callable[..., torch.Tensor]) -> Arena:
        """An arena of at least this size for a call: one that no call uses, or a new one."""
        with self._lock:
            every = [arena for found in self._all if (arena := found()) is not None]
            for arena in every:
                is_alike = num_bytes <= arena.num_bytes <= num_bytes * _MOST_RATIO
                if is_alike and not arena.is_outgrown and arena.take():
                    return arena
            for arena in every:
                if arena.num_bytes < num_bytes <= arena.num_bytes * _MOST_RATIO:
                    arena.outgrow()
            made = Arena(empty((num_bytes,), (1,), torch.uint8))
            self._all = tuple(map(ref, (*every, made)))
            return made


ARENAS = Arenas()
