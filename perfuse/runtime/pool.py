"""Pooled memory for large results: freed blocks are used again while their pages are still there.

The C library gives large blocks back to the system when they are freed, so a program that returns
a large tensor pays a page fault for every 4 KiB of it on every call, often more than the kernel
itself costs (benchmarks/results, rmsnorm_t5). Blocks here keep their pages and ask for huge ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from perfuse import config
from perfuse.schedule.memory import HUGE_PAGE, SMALLEST_POOLED, pooled_bytes

_ADVISE_HUGE = 14  # MADV_HUGEPAGE


class Pool:
    """Free blocks by size. Taking and giving back are safe from any thread."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[int, mmap.mmap]]] = {}
        self._free_bytes = 0
        self._used_bytes = 0
        self._watchers: tuple[Callable[[int], None], ...] = ()
        # Reentrant: a collection of garbage may start under the lock and give back blocks itself.
        self._lock = threading.RLock()

    def take(self, num_bytes: int) -> _Block:
        """A block of at least so many bytes; it comes back when the returned object dies."""
        size = pooled_bytes(num_bytes)
        found = None
        with self._lock:
            blocks = self._free.get(size)
            if blocks:
                found = blocks.pop()
                self._free_bytes -= size
            self._count(size)
        address, memory = found if found is not None else _mapped(size)
        block: _Block = _block_type(size).from_address(address)
        block.home = (self, size, address, memory)
        return block

    def give_back(self, size: int, address: int, memory: mmap.mmap) -> None:
        limit = config.snapshot().cpu.pool_limit_bytes
        with self._lock:
            self._count(-size)
            if self._free_bytes + size <= limit:
                self._free.setdefault(size, []).append((address, memory))
                self._free_bytes += size
        # A block over the limit is unmapped when its mmap object dies here.

    def _count(self, change: int) -> None:
        self._used_bytes += change
        for watcher in self._watchers:
            watcher(change)

    @contextmanager
    def watched(self, watcher: Callable[[int], None]) -> Iterator[None]:
        """In this block, `watcher` is told the bytes of every block taken, or given back (less)."""
        with self._lock:
            self._watchers = (*self._watchers, watcher)
        try:
            yield
        finally:
            with self._lock:
                self._watchers = tuple(w for w in self._watchers if w is not watcher)

    def clear(self) -> None:
        """Return everything unused to the system."""
        with self._lock:
            self._free.clear()
            self._free_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Kept for reuse."""
        return self._free_bytes

    @property
    def used_bytes(self) -> int:
        """Held by tensors and arenas."""
        return self._used_bytes


def _mapped(size: int) -> tuple[int, mmap.mmap]:
    spare = HUGE_PAGE if size >= HUGE_PAGE else 0
    memory = mmap.mmap(-1, size + spare)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if spare and hasattr(memory, "madvise"):
        with contextlib.suppress(OSError):  # a kernel without huge pages serves us all the same
            memory.madvise(_ADVISE_HUGE)
        start += -start % HUGE_PAGE
    return start, memory


class _Block:
    """What a tensor's storage holds on to; see `_block_type` for the buffer it is."""

    home: tuple[Pool, int, int, mmap.mmap]

    def __del__(self) -> None:
        pool, size, address, memory = self.home
        pool.give_back(size, address, memory)


_BLOCK_TYPES: dict[int, Any] = {}


def _block_type(size: int) -> Any:
    found = _BLOCK_TYPES.get(size)
    if found is None:
        found = _BLOCK_TYPES[size] = type("Block", (_Block, ctypes.c_char * size), {})
    return found


POOL = Pool()


def empty_strided(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """As torch.empty_strided on the CPU, from the pool where that pays."""
    span = 1
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return torch.empty_strided(shape, strides, dtype=dtype)
        span += (size - 1) * stride
    num_bytes = span * dtype.itemsize
    if num_bytes < SMALLEST_POOLED:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return pooled(num_bytes, dtype, span).as_strided(shape, strides)


def pooled(num_bytes: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """A flat tensor over a pooled block."""
    return torch.frombuffer(POOL.take(num_bytes), dtype=dtype, count=count)
