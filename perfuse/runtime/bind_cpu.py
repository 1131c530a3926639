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
from perfuse.runtime.guard import Guard, GuardLayout
from perfuse.runtime.host_names import Call, new_seeds, run_host, window
from perfuse.runtime.pool import IdleFrames, allocator
from perfuse.torch_compat.tensors import cpu_allocator

_DEFAULT = Settings()

# What kernels report for an integer division by zero: `division_by_zero` of simd_divide.h.
_DIVISION_BY_ZERO = -(2**63)


class CpuFrame:
    """Tables, arena and windows for one call at a time."""

    __slots__ = tuple("arena pointers pointers_at sizes sizes_at start status windows".split())

    def __init__(self, host: HostSource, empty: Callable[..., torch.Tensor]) -> None:
        self.pointers = array("q", bytes(8 * host.num_pointers))
        self.sizes = array("q", bytes(8 * host.num_sizes))
        self.status = array("q", [0])
        self.pointers_at = self.pointers.buffer_info()[0]
        self.sizes_at = self.sizes.buffer_info()[0]
        self.pointers[0] = self.status.buffer_info()[0]
        slack = guard.SLACK if host.guards else 0
        self.arena = empty((host.arena_bytes + 64 + slack,), (1,), torch.uint8)
        skip = -self.arena.data_ptr() % 64 + (guard.next_start() if host.guards else 0)
        self.start = skip
        base = self.arena.data_ptr() + skip
        for place, offset in host.fixed_pointers:
            self.pointers[place] = base + offset
        self.windows = [window(self.arena[skip:], made) for made in host.windows]


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


def bind(
    host: HostSource,
    library: bytes | None,
    constants: Mapping[str, Any],
    settings: Settings = _DEFAULT,
) -> Call:
    """The callable of a host program: takes the graph's arguments in a list, which it empties."""
    frames = IdleFrames()
    empty_strided = allocator(settings.thresholds.pool_bytes)

    def take_frame() -> CpuFrame:
        # Checking first would be a race: another thread may take the last frame in between.
        try:
            found: CpuFrame = frames.pop()
        except IndexError:
            return CpuFrame(host, empty_strided)
        return found

    layout = GuardLayout(host, 1)
    space: dict[str, Any] = {
        "guard": lambda frame: Guard(layout, frame.arena[frame.start :][: host.arena_bytes]),
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
