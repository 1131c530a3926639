"""Launching compiled kernels through the GPU's driver, a segment with one call.

A record says which function is launched and where the values of its arguments are: in the tables
of the frame, which the host program fills. The driver copies them when it launches.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch

from perfuse.build.bundle import Bundle, CodeObject
from perfuse.build.loader import load_library
from perfuse.codegen.host.tables import UNKNOWN, FillRow, HostCallRow, LaunchRow, MappedLaunchRow
from perfuse.errors import PerfuseError
from perfuse.gpu import Platform, gpu_of_device
from perfuse.runtime.frame import GpuFrame
from perfuse.runtime.host_library import NO_UNITS, CallArguments, HostLibrary
from perfuse.runtime.records import kind_of

RECORD_WORDS, SEGMENT_WORDS = 10, 3
MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of a tensor map, as the driver wants them

Launched = LaunchRow | MappedLaunchRow


class Library(Protocol):
    """launcher.cpp, or python_launcher.py in its place."""

    def pf_load(
        self, code: bytes, symbol: bytes, shared_bytes: int, device: int, function: Any, /
    ) -> int:
        """Find a function of a code object."""

    def pf_launch(self, segment: int, stream: int, /) -> int:
        """Launch a segment."""

    def pf_error(self, code: int, /) -> bytes | None:
        """The text for an error code."""


@cache
def open_library(data: bytes, kind: Platform) -> Library:
    """The launcher, with the driver of this kind of GPU open."""
    library = load_library(data)
    library.pf_load.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    library.pf_launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.pf_launch.restype = ctypes.c_int
    library.pf_error.restype = ctypes.c_char_p
    if library.pf_open(int(kind is Platform.HIP)) != 0:
        raise PerfuseError(f"the {kind} GPU driver is not installed, or is too old")
    opened: Any = library
    found: Library = opened
    return found


class Driver:
    """Launches the kernels of one bundle on one device."""

    def __init__(
        self,
        bundle: Bundle,
        device: torch.device,
        library: Library,
        units: Mapping[str, HostLibrary] = NO_UNITS,
    ) -> None:
        self.library = library
        self.units = units
        self.device = device
        self.objects = {made.name: made for made in bundle.objects}
        self.functions = {made.name: self._load(made) for made in bundle.objects}
        self.keeps_memory = bool(units) or any(made.scratch_bytes for made in bundle.objects)
        self.launch: Callable[[Any, int], int] = library.pf_launch

    def _load(self, made: CodeObject) -> int:
        found = ctypes.c_void_p()
        shared, index = made.shared_bytes, self.device.index or 0
        code = self.library.pf_load(
            made.code, made.symbol.encode(), shared, index, ctypes.byref(found)
        )
        if code or found.value is None:
            asked = f"{shared} bytes of shared memory and {made.num_threads} threads per block"
            raise PerfuseError(
                f"cannot load the kernel {made.name} ({asked}): {self._said(code)}{_limit(index)}"
            )
        return found.value

    def failed(self, code: int) -> None:
        """Raise the driver's error for a failed launch."""
        raise RuntimeError(f"perfuse: launching a kernel failed: {self._said(code)}")

    def _said(self, code: int) -> str:
        text = self.library.pf_error(code)
        return f"{text.decode() if text else 'unknown error'} (code {code})"

    def prepare(self, frame: GpuFrame) -> None:
        """Lay out the records of a frame, which point into its tables."""
        tables = frame.tables
        arguments = Arguments(frame)
        words = array("Q")
        for number, row in enumerate(tables.records):
            words.extend(kind_of(row).words(self, arguments, number, row))
        at, size = words.buffer_info()[0], 8 * RECORD_WORDS
        index = self.device.index or 0
        segments = array("Q")
        for first, count in tables.segments:
            segments.extend((count, at + first * size, index))
        start, size = segments.buffer_info()[0], 8 * SEGMENT_WORDS
        frame.segments = [start + k * size for k in range(len(tables.segments))]
        frame.memory = (words, segments, arguments)

    def launch_words(self, arguments: Arguments, number: int, row: Launched) -> tuple[int, ...]:
        made, function = self.objects[row.kernel], self.functions[row.kernel]
        maps = row.maps if isinstance(row, MappedLaunchRow) else ()
        first, values = arguments.maps(maps)
        passed = arguments.of(row, values, self._scratch(made, row))
        grid = arguments.grid(number)
        shape = (made.num_threads, made.shared_bytes, grid)
        return (function, *shape, passed, 0, 0, 0, first, len(maps))

    def call_words(self, arguments: Arguments, row: HostCallRow) -> tuple[int, ...]:
        unit = self.units[row.unit]
        size = unit.workspace_bytes(row)
        memory = torch.empty(size, dtype=torch.uint8, device=self.device) if size else None
        made = CallArguments(arguments.pointers, row, memory)
        arguments.kept.append(made)
        return made.words(unit.address)

    def _scratch(self, made: CodeObject, row: Launched) -> torch.Tensor | None:
        """Global scratch that the kernel needs per block."""
        if not made.scratch_bytes:
            return None
        if UNKNOWN in row.grid:
            raise PerfuseError(f"{made.name} needs scratch for an unknown number of blocks")
        blocks = row.grid[0] * row.grid[1] * row.grid[2]
        return torch.empty(blocks * made.scratch_bytes, dtype=torch.uint8, device=self.device)


def _limit(index: int) -> str:
    """The limit of this GPU per block, if there is a GPU to query."""
    if not torch.cuda.is_available():
        return ""
    return f"; the limit per block is {gpu_of_device(index).shared_bytes} bytes"


class Arguments:
    """Lists of the addresses of a launch's arguments, kept alive with their frame."""

    def __init__(self, frame: GpuFrame) -> None:
        self.pointers = frame.pointers.buffer_info()[0]
        self.sizes = frame.sizes.buffer_info()[0]
        self.grids = frame.grids.buffer_info()[0]
        self.kept: list[Any] = []

    def grid(self, number: int) -> int:
        """Where the grid of a record is stored."""
        return self.grids + 24 * number

    def fill_words(self, number: int, row: FillRow) -> tuple[int, ...]:
        pattern, memory = bytes.fromhex(row.pattern), self.pointers + 8 * row.pointer
        value = int.from_bytes(pattern, "little")
        return (0, 0, 0, self.grid(number), 0, memory, value, len(pattern), 0, 0)

    def maps(self, rows: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
        """Where the maps of a launch are described, and the addresses of what is passed for them.

        A kernel takes a map itself, the two sizes of the matrix and its two strides.
        """
        if not rows:
            return 0, []
        memory = ctypes.create_string_buffer(MAP_BYTES * len(rows) + MAP_ALIGNMENT)
        made_at = -(-ctypes.addressof(memory) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        words, numbers = array("Q"), array("q")
        for k, (place, *described) in enumerate(rows):
            words.extend((self.pointers + 8 * place, 0, made_at + MAP_BYTES * k, *described))
            _, width, height, across, stride, *_ = described
            numbers.extend((height, across, stride // width, 1))
        at = numbers.buffer_info()[0]
        passed: list[int] = []
        for k in range(len(rows)):
            passed.append(made_at + MAP_BYTES * k)
            passed += [at + 8 * (4 * k + which) for which in range(4)]
        self.kept += [memory, words, numbers]
        return words.buffer_info()[0], passed

    def of(self, row: Launched, maps: Sequence[int], scratch: torch.Tensor | None) -> int:
        """Pointers, sizes, maps, and the two scratch pointers that Triton adds to every kernel."""
        extra = array("Q", [0 if scratch is None else scratch.data_ptr(), 0])
        at = extra.buffer_info()[0]
        found = [self.pointers + 8 * place for place in row.pointers]
        found += [self.sizes + 8 * place for place in row.sizes]
        passed = array("Q", [*found, *maps, at, at + 8])
        self.kept += [extra, passed, scratch]
        return passed.buffer_info()[0]
