"""`Executable`: a host program bound to its library, with frames for calls in flight."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from perfuse.build.loader import load_library
from perfuse.codegen.host.source import HostSource
from perfuse.config import Settings
from perfuse.context import CPU
from perfuse.forking import is_forked
from perfuse.runtime import guard
from perfuse.runtime.arena import ARENAS, LEAST_SHARED_BYTES, Arena
from perfuse.runtime.guard import Guard, GuardLayout
from perfuse.runtime.host_names import Call, new_seeds, run_host, window
from perfuse.runtime.pool import IdleFrames, allocator
from perfuse.torch_compat.tensors import cpu_allocator

_DEFAULT = Settings()

# What kernels report for an integer division by zero: `division_by_zero` of simd_divide.h.
_DIVISION_BY_ZERO = -(2**63)


_SLACK = 64  # bytes of an arena before its first aligned one


class CpuFrame:
    """Tables, arena and windows for one call at a time."""

    __slots__ = (
        *("__weakref__", "arena", "is_in_call", "pointers", "pointers_at"),
        *("sizes", "sizes_at", "start", "status", "windows"),
    )

    def __init__(self, host: HostSource, arena: Arena) -> None:
        self.arena = arena
        self.is_in_call = True
        self.pointers = array("q", bytes(8 * host.num_pointers))
        self.sizes = array("q", bytes(8 * host.num_sizes))
        self.status = array("q", [0])
        self.pointers_at = self.pointers.buffer_info()[0]
        self.sizes_at = self.sizes.buffer_info()[0]
        self.pointers[0] = self.status.buffer_info()[0]
        first = arena.memory.data_ptr()
        self.start = -first % _SLACK + (guard.next_start() if host.guards else 0)
        for place, offset in host.fixed_pointers:
            self.pointers[place] = first + self.start + offset
        self.windows = [window(arena.memory[self.start :], made) for made in host.windows]
        arena.frames.add(self)

    def __del__(self) -> None:
        """Leave the arena to others if the call failed: its frame goes with it."""
        if self.is_in_call:
            self.arena.leave()


class SharedFrames(IdleFrames):
    """Idle frames of a program whose arenas other programs may be using."""

    __slots__ = ()

    def append(self, frame: CpuFrame) -> None:
        """Take a frame back after its call."""
        frame.is_in_call = False
        frame.arena.leave()
        super().append(frame)

    def take(self) -> CpuFrame | None:
        """A frame whose arena is free, reserved for a call; None if there is none."""
        busy = []
        found: CpuFrame | None = None
        while found is None:
            try:
                frame: CpuFrame = self.pop()
            except IndexError:
                break
            if frame.arena.is_outgrown:
                continue  # the next frame of this program is made over the larger arena
            if frame.arena.take():
                frame.is_in_call = True
                found = frame
            else:
                busy.append(frame)
        self.extend(busy)
        return found


def _num_threads(chosen: int) -> int:
    """Threads of a kernel: one after a fork, where OpenMP would wait for threads that are gone."""
    if is_forked():
        return 1
    return chosen or torch.get_num_threads()


def _bad_index(frame: CpuFrame, where: str, sizes: tuple[int, ...]) -> None:
    """Raise what eager raises. The frame is dropped with the failed call and never reused."""
    seen = frame.status[0]
    if seen == _DIVISION_BY_ZERO:
        raise RuntimeError("ZeroDivisionError")
    index = seen - 1 if seen > 0 else seen + 1
    crossed = {size for size in sizes if not -size <= index < size}
    bound = f" for a dimension of size {crossed.pop()}" if len(crossed) == 1 else ""
    raise IndexError(f"index {index} is out of bounds{bound}" + (f", in {where}" if where else ""))


_Frames = tuple[IdleFrames, Callable[[], CpuFrame]]  # and how a call takes one


def _private(host: HostSource, empty: Callable[..., torch.Tensor]) -> _Frames:
    """Frames with arenas of their own."""
    num_bytes = host.arena_bytes + _SLACK + (guard.SLACK if host.guards else 0)
    frames = IdleFrames()

    def take_frame() -> CpuFrame:
        # Asking first would race: another thread may take the last frame in between.
        try:
            found: CpuFrame = frames.pop()
        except IndexError:
            return CpuFrame(host, Arena(empty((num_bytes,), (1,), torch.uint8)))
        return found

    return frames, take_frame


def _shared(host: HostSource, empty: Callable[..., torch.Tensor]) -> _Frames:
    """Frames with arenas that other programs use between calls."""
    frames = SharedFrames()

    def take_frame() -> CpuFrame:
        return frames.take() or CpuFrame(host, ARENAS.taken(host.arena_bytes + _SLACK, empty))

    return frames, take_frame


def bind(
    host: HostSource,
    library: bytes | None,
    constants: Mapping[str, Any],
    settings: Settings = _DEFAULT,
) -> Call:
    """The callable of a host program: takes the graph's arguments in a list, which it empties."""
    empty_strided = allocator(settings.thresholds.pool_bytes)
    is_shared = host.arena_bytes >= LEAST_SHARED_BYTES and not host.guards
    frames, take_frame = (_shared if is_shared else _private)(host, empty_strided)
    layout = GuardLayout(host, 1)
    space: dict[str, Any] = {
        "guard": lambda frame: Guard(layout, frame.arena.memory[frame.start :][: host.arena_bytes]),
        "frames": frames,
        "take_frame": take_frame,
        "get_num_threads": partial(_num_threads, settings.cpu.threads),
        "empty_strided": empty_strided,
        "empty_small": cpu_allocator(),
        "new_seeds": partial(new_seeds, CPU),
        "bad_index": _bad_index,
    }
    loaded = load_library(library) if library is not None else None
    for segment in host.segments:
        function = getattr(loaded, segment)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        function.restype = None
        space[segment] = function
    return run_host(host, space, constants)
