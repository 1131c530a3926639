"""`Executable`: a host program bound to its library, with frames for calls in flight."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from perfuse.build import load_library
from perfuse.codegen.host.program import HostSource, function_name
from perfuse.runtime.layout import HOST_FILE, addresses, resolve_op, window, with_strides
from perfuse.runtime.pool import empty_strided, pooled
from perfuse.schedule.memory import SMALLEST_POOLED

Call = Callable[[list[Any]], tuple[Any, ...]]


class Frame:
    """Tables, arena and windows for one call at a time."""

    __slots__ = ("arena", "pointers", "pointers_at", "sizes", "sizes_at", "status", "windows")

    def __init__(self, host: HostSource) -> None:
        self.pointers = array("q", bytes(8 * host.num_pointers))
        self.sizes = array("q", bytes(8 * host.num_sizes))
        self.status = array("q", [0])
        self.pointers_at = self.pointers.buffer_info()[0]
        self.sizes_at = self.sizes.buffer_info()[0]
        self.pointers[0] = self.status.buffer_info()[0]
        self.arena = _arena(host.arena_bytes + 64)
        skip = -self.arena.data_ptr() % 64
        base = self.arena.data_ptr() + skip
        for place, offset in host.fixed_pointers:
            self.pointers[place] = base + offset
        self.windows = [window(self.arena[skip:], made) for made in host.windows]


def _arena(num_bytes: int) -> torch.Tensor:
    if num_bytes < SMALLEST_POOLED:
        return torch.empty(num_bytes, dtype=torch.uint8)
    return pooled(num_bytes, torch.uint8, num_bytes)


def new_seeds(count: int) -> torch.Tensor:
    """One seed per random op, drawn from torch's default generator so that manual_seed rules."""
    return torch.empty(count, dtype=torch.int64).random_()


def _bad_index(frame: Frame, where: str) -> None:
    """Raise what eager raises. The frame is dropped with the failed call, never used again."""
    seen = frame.status[0]
    index = seen - 1 if seen > 0 else seen + 1
    raise IndexError(f"index {index} is out of bounds" + (f", in {where}" if where else ""))


def bind(
    host: HostSource,
    library: str | None,
    constants: Mapping[str, Any],
    num_threads: int = 0,
) -> Call:
    """The callable of a host program: takes the graph's arguments in a list, which it empties."""
    frames: list[Frame] = []

    def take_frame() -> Frame:
        # Asking first would race: another thread may take the last frame in between.
        try:
            return frames.pop()
        except IndexError:
            return Frame(host)

    space: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "frames": frames,
        "take_frame": take_frame,
        "get_num_threads": (lambda: num_threads) if num_threads else torch.get_num_threads,
        "empty_strided": empty_strided,
        "as_strided": torch.as_strided,
        "with_strides": with_strides,
        "new_seeds": new_seeds,
        "bad_index": _bad_index,
        "addresses": addresses,
    }
    loaded = load_library(Path(library)) if library else None
    for segment in host.segments:
        function = getattr(loaded, segment)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        function.restype = None
        space[segment] = function
    for op in host.ops:
        is_given = op.startswith("py:")
        space[function_name(op)] = constants[op] if is_given else resolve_op(op)
    space |= {name: value for name, value in constants.items() if not name.startswith("py:")}
    exec(compile(host.text, HOST_FILE, "exec"), space)
    call: Call = space["call"]
    return call
