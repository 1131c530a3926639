"""`GpuFrame`: the tables of one GPU call at a time. Launching copies what it reads from them."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import torch

from perfuse.codegen.host.source import HostSource
from perfuse.codegen.host.tables import FillRow, GpuTables
from perfuse.runtime.guard import SLACK, next_start
from perfuse.runtime.host_names import window


class GpuFrame:
    """Addresses, sizes and grids, what is launched from them, and memory that is kept."""

    __slots__ = tuple("arena grids home kept memory pointers segments sizes tables windows".split())

    def __init__(self, host: HostSource, home: list[GpuFrame]) -> None:
        assert host.gpu is not None
        self.tables: GpuTables = host.gpu
        self.home = home  # where it waits between calls: those of one stream
        self.pointers = array("q", bytes(8 * host.num_pointers))
        self.sizes = array("q", bytes(8 * host.num_sizes))
        self.grids = array("q", [number for row in self.tables.records for number in row.grid])
        self.segments: list[Any] = []
        self.memory: Any = None  # what the segments point to
        # The same for all calls, whatever mode the first is made in.
        with torch.inference_mode(False), torch.no_grad():
            self._take_memory(host)

    def _take_memory(self, host: HostSource) -> None:
        device = self.tables.device
        skip, slack = (next_start(), SLACK) if host.guards else (0, 0)
        memory = torch.empty(host.arena_bytes + slack, dtype=torch.uint8, device=device)
        self.arena = memory[skip : skip + host.arena_bytes]
        start = self.arena.data_ptr()
        for place, offset in host.fixed_pointers:
            self.pointers[place] = start + offset
        self.windows = [window(self.arena, made) for made in host.windows]
        self.kept = [_filled(r.pattern, r.count, device) for r in self.tables.kept]
        for row, memory in zip(self.tables.kept, self.kept, strict=True):
            self.pointers[row.pointer] = memory.data_ptr()

    def fill(self, number: int, row: FillRow) -> None:
        """Fill memory that the CPU can write, as a driver would fill its own."""
        pattern, count = bytes.fromhex(row.pattern), self.grid(number)[0]
        ctypes.memmove(self.pointers[row.pointer], pattern * count, len(pattern) * count)

    def grid(self, number: int) -> tuple[int, int, int]:
        """The grid of a record; for a fill, the count and two meaningless numbers."""
        x, y, z = self.grids[3 * number : 3 * number + 3]
        return x, y, z


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _filled(pattern: str, count: int, device: str) -> torch.Tensor:
    """Filled on the device: a copy from the host could not be recorded in a CUDA graph."""
    element = bytes.fromhex(pattern)
    number = int.from_bytes(element, "little", signed=True)
    return torch.full((count,), number, dtype=_INTEGERS[len(element)], device=device)
