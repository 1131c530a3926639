"""Idle frames, and releasing the memory that they and the pool hold."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from perfuse.runtime.pool import POOL, trim_heap


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
    allocator: `torch.cuda.empty_cache()` hands it on to the system.
    """
    for frames in list(_EVERY):
        frames.clear()
    POOL.shrink()
    trim_heap()
