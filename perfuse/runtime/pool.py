"""Pooled memory for large results: freed blocks are reused while their pages are still mapped.

The C library gives large blocks back to the system when they are freed, so a program that returns
a large tensor pays a page fault for every 4 KiB of it on every call, often more than the kernel
itself costs (benchmarks/results, rmsnorm_t5). Blocks here keep their pages and ask for huge ones.

A block is an ordinary storage of PyTorch's own allocator: private to the process after a fork,
resizable, and out of memory raises PyTorch's own error. The pool keeps a reference to every block
it allocated, up to its limit, and a block is free when nothing else refers to it. `release_memory`
frees what is unused, here and in the frames of programs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch

from perfuse import config
from perfuse.forking import ForkLock
from perfuse.torch_compat.tensors import cpu_allocator, storage_handle, storage_use_counter

_ADVISE_HUGE = 14  # MADV_HUGEPAGE

_use_count = storage_use_counter()

# Blocks looked at before those known to be free: the last ones taken, still in the caches.
_RECENT = 4
# Calls of ever new sizes would fill the pool with blocks that are never taken again: it keeps at
# most the larger of these bytes and this many times what was in use.
_LEAST_KEPT, _MOST_RATIO = 1 << 26, 4
# A search for free blocks that found none is repeated when 1 / _PATIENCE as many were made.
_PATIENCE = 8


class _Block:
    """A storage, the pool's own tensor over it, and how many hold it when nobody else does."""

    __slots__ = ("_handle", "_references", "_template", "_users", "address", "storage")

    def __init__(self, num_bytes: int) -> None:
        self._template = torch.empty(num_bytes, dtype=torch.uint8)
        self.storage = self._template.untyped_storage()
        self.address = self._template.data_ptr()
        self._handle = storage_handle(self.storage)
        self._users = _use_count(self._handle)
        self._references = sys.getrefcount(self.storage)

    def is_free(self) -> bool:
        """Whether neither a tensor nor a handle of the storage is left outside of the pool."""
        return (
            _use_count(self._handle) == self._users
            and sys.getrefcount(self.storage) == self._references
        )

    def is_whole(self, num_bytes: int) -> bool:
        """Whether nobody resized the storage, or moved it into shared memory."""
        return self.storage.nbytes() == num_bytes and self.storage.data_ptr() == self.address

    def tensor(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A new tensor over the block: not a view, and an ordinary tensor to autograd."""
        kept = self._template
        if kept.shape != shape or kept.stride() != strides or kept.dtype is not dtype:
            # The old one stays until the new one is there: the storage must not die between.
            kept = torch.empty(0, dtype=dtype)
            kept.set_(self.storage, 0, shape, strides)
            self._template = kept
        made: torch.Tensor = torch.empty(0, dtype=dtype).set_(kept)  # type: ignore[call-overload]
        return made


class _Shelf:
    """The blocks of one size."""

    __slots__ = ("free", "num_unsought", "taken")

    def __init__(self) -> None:
        self.taken: list[_Block] = []  # in the order of taking; free ones may be among them
        self.free: list[_Block] = []  # found to be free
        self.num_unsought = 0  # blocks made since a search found nothing

    def pop(self) -> _Block | None:
        taken = self.taken
        for k in range(1, min(_RECENT, len(taken)) + 1):
            if taken[-k].is_free():
                return taken.pop(-k)
        if not self.free and self.num_unsought * _PATIENCE >= len(taken):
            self.search()
        return self.free.pop() if self.free else None

    def search(self) -> None:
        """Move free blocks to where they are taken from, the last taken on top."""
        found = [block for block in self.taken if block.is_free()]
        if found:
            free = set(found)
            self.taken = [block for block in self.taken if block not in free]
            self.free += found
        self.num_unsought = len(self.taken) if found else 0


class Pool:
    """Blocks by size. Taking is thread-safe; a block is returned by dropping the tensor."""

    def __init__(self) -> None:
        # Reentrant: garbage may be collected under the lock, and run a compiled function itself.
        self._lock = ForkLock()
        self.forget()

    def forget(self) -> None:
        """Reset to an empty pool: at a fork, another thread may have been changing it."""
        self._shelves: dict[int, _Shelf] = {}  # least recently used first
        self._held_bytes = 0
        self._most_kept = _LEAST_KEPT
        self._num_unshrunk = 0  # blocks made since shrinking found nothing to give back
        self._num_bypasses = 0
        self._is_inside = False

    def take(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, num_bytes: int
    ) -> torch.Tensor:
        """A tensor at the start of a storage of this many bytes."""
        with self._lock:
            if self._is_inside or self._num_bypasses:
                return self._made(num_bytes).tensor(shape, strides, dtype)
            self._is_inside = True
            try:
                block = self._popped(num_bytes)
                if block is not None:
                    tensor = block.tensor(shape, strides, dtype)
                    self._shelves[num_bytes].taken.append(block)
                    return tensor
                return self._new(shape, strides, dtype, num_bytes)
            finally:
                self._is_inside = False

    def _popped(self, num_bytes: int) -> _Block | None:
        shelf = self._shelves.pop(num_bytes, None)
        if shelf is None:
            return None
        self._shelves[num_bytes] = shelf
        while (block := shelf.pop()) is not None:
            if block.is_whole(num_bytes):
                return block
            self._held_bytes -= num_bytes
        return None

    def _new(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, num_bytes: int
    ) -> torch.Tensor:
        limit = config.snapshot().cpu.pool_limit_bytes
        if self._held_bytes + num_bytes > self._most_kept:
            self._drop_unused_sizes(num_bytes)
        if num_bytes <= limit < self._held_bytes + num_bytes:
            self._make_room(limit - num_bytes)
        block = self._made(num_bytes)
        tensor = block.tensor(shape, strides, dtype)
        if self._held_bytes + num_bytes <= limit:
            shelf = self._shelves.setdefault(num_bytes, _Shelf())
            shelf.taken.append(block)
            shelf.num_unsought += 1
            self._held_bytes += num_bytes
        return tensor

    def _made(self, num_bytes: int) -> _Block:
        try:
            block = _Block(num_bytes)
        except RuntimeError:
            self._shrink(0)
            block = _Block(num_bytes)
        _ask_for_huge_pages(block.address, num_bytes)
        return block

    def _drop_unused_sizes(self, num_bytes: int) -> None:
        """Let go of the sizes least recently used, some more than room for this many bytes."""
        for shelf in self._shelves.values():
            shelf.search()
        used = sum(size * len(shelf.taken) for size, shelf in self._shelves.items())
        self._most_kept = max(self._most_kept, _MOST_RATIO * (used + num_bytes))
        self._shrink(self._most_kept * 3 // 4 - num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        """Shrink, unless a while ago all blocks were in use."""
        self._num_unshrunk += 1
        num_held = sum(len(shelf.taken) for shelf in self._shelves.values())
        if self._num_unshrunk * _PATIENCE >= num_held or self._held_bytes <= num_bytes:
            self._shrink(num_bytes)
            self._num_unshrunk = 0

    def _shrink(self, num_bytes: int) -> None:
        """Let go of free blocks, the least recently used sizes first, down to this many bytes."""
        for size, shelf in list(self._shelves.items()):
            if self._held_bytes <= num_bytes:
                return
            shelf.search()
            while shelf.free and self._held_bytes > num_bytes:
                del shelf.free[0]
                self._held_bytes -= size
            if not shelf.free and not shelf.taken:
                del self._shelves[size]

    def shrink(self, num_bytes: int = 0) -> None:
        """Give free blocks back until the pool holds at most this many bytes, used ones counted."""
        with self._lock:
            self._most_kept = _LEAST_KEPT
            if not self._is_inside:
                self._shrink(num_bytes)

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """A context in which everything is taken from and released to PyTorch's allocator."""
        with self._lock:
            self._num_bypasses += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_bypasses -= 1

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept for reuse."""
        with self._lock:
            for shelf in self._shelves.values():
                shelf.search()
            return sum(size * len(shelf.free) for size, shelf in self._shelves.items())

    @property
    def used_bytes(self) -> int:
        """Held by tensors and arenas, of what the pool keeps track of."""
        with self._lock:
            return self._held_bytes - self.free_bytes


def _ask_for_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for huge pages where a whole one fits; a system without them works too."""
    if num_bytes < config.snapshot().thresholds.huge_page_bytes or _LIBC is None:
        return
    start = address - address % mmap.PAGESIZE
    end = -(-(address + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _ADVISE_HUGE)


def _libc() -> ctypes.CDLL | None:
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        if sys.platform == "linux" and library.madvise:
            return library
    return None


_LIBC = _libc()
POOL = Pool()
os.register_at_fork(after_in_child=POOL.forget)
config.watch(lambda settings: POOL.shrink(settings.cpu.pool_limit_bytes))


def allocator(smallest: int) -> Callable[..., torch.Tensor]:
    """As torch.empty_strided on the CPU, from the pool for at least this many bytes."""
    plain, take = cpu_allocator(), POOL.take

    def empty_strided(
        shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        span = 1
        for size, stride in zip(shape, strides, strict=True):
            if size == 0:
                return plain(shape, strides, dtype)
            span += (size - 1) * stride
        num_bytes = span * dtype.itemsize
        if num_bytes < smallest:
            return plain(shape, strides, dtype)
        return take(shape, strides, dtype, num_bytes)

    return empty_strided


class IdleFrames(list[Any]):
    """The frames of one program, or of one program on one stream, that no call uses now."""

    __slots__ = ("__weakref__",)
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        _EVERY.add(self)


_EVERY: WeakSet[IdleFrames] = WeakSet()


def release_memory() -> None:
    """Release memory that Perfuse keeps for later calls: pooled buffers and arenas.

    Results that are still held, and what CUDA graphs recorded, stay as they are. The next call of
    each compiled function allocates its memory again. On a GPU the memory goes back to PyTorch's
    allocator: `torch.cuda.empty_cache()` returns it to the system.
    """
    for frames in list(_EVERY):
        frames.clear()
    POOL.shrink()
    if _LIBC is not None and hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)  # gives free memory back to the system
