"""Memory that kernels access: the arguments of a launch, and the local memory of workgroups.

Device memory is memory of this process: an address in a register is an address here. An access
that is not inside one of the launch's arguments raises, so that a wrong kernel cannot harm.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.gfx9.errors import BadAddress

Array = np.ndarray[Any, Any]

# Numpy takes no array that starts at address 0, where there is never anything.
FIRST, LAST = 1 << 12, 1 << 47
_ALL = np.frombuffer((ctypes.c_uint8 * (LAST - FIRST)).from_address(FIRST), dtype=np.uint8)


class Memory:
    """The bytes that a launch may access."""

    def __init__(self, regions: Sequence[tuple[int, int]]) -> None:
        """`regions` are starts and lengths; they may overlap."""
        self.regions = tuple(regions)
        spans: list[list[int]] = []
        for start, length in sorted(regions):
            if spans and start < spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], start + length)
            elif length:
                spans.append([start, start + length])
        self.starts = np.array([start for start, _ in spans] or [0], np.uint64)
        self.ends = np.array([end for _, end in spans] or [0], np.uint64)

    def with_region(self, region: tuple[int, int]) -> Memory:
        """This memory and one more region."""
        return Memory((*self.regions, region))

    def check(self, addresses: Array, size: int) -> None:
        """Raise where `size` bytes at an address are not all in one region."""
        place = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        last = addresses + np.uint64(size)
        bad = (place < 0) | (last > self.ends[np.maximum(place, 0)])
        if bad.any():
            which = int(addresses[bad][0])
            raise BadAddress(
                f"{size} bytes at {which:#x}, {self._nearest(which)}, "
                f"which is outside the arguments of the launch ({int(bad.sum())} such accesses)"
            )

    def _nearest(self, address: int) -> str:
        rows = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        distance, text = min(
            (start - address, f"{start - address} bytes before an argument")
            if address < start
            else (address - end, f"{address - end} bytes after the end of an argument")
            for start, end in rows
        )
        return text if distance < 1 << 20 else "far from every argument"

    def load(self, addresses: Array, size: int) -> Array:
        """The bytes at each address, as an array (addresses, size) of uint8."""
        self.check(addresses, size)
        found: Array = _ALL[_places(addresses, size)]
        return found

    def store(self, addresses: Array, data: Array) -> None:
        """Write a row of bytes at each address."""
        size = data.shape[1]
        self.check(addresses, size)
        _ALL[_places(addresses, size)] = data


def _places(addresses: Array, size: int) -> Array:
    first = addresses.astype(np.int64) - FIRST
    return first[:, None] + np.arange(size)


class LocalMemory:
    """The local memory (LDS) of each workgroup that runs; its content is arbitrary at first."""

    def __init__(self, num_groups: int, size: int) -> None:
        self.size = size
        self.bytes = np.full(num_groups * size, 0xA5, dtype=np.uint8)

    def _places(self, group: Array, offsets: Array, size: int) -> Array:
        bad = offsets.astype(np.int64) + size > self.size
        if bad.any():
            raise BadAddress(
                f"{size} bytes at offset {int(offsets[bad][0])} of a workgroup's local memory, "
                f"which has {self.size} bytes"
            )
        first = group.astype(np.int64) * self.size + offsets.astype(np.int64)
        return first[:, None] + np.arange(size)

    def load(self, group: Array, offsets: Array, size: int) -> Array:
        found: Array = self.bytes[self._places(group, offsets, size)]
        return found

    def store(self, group: Array, offsets: Array, data: Array) -> None:
        self.bytes[self._places(group, offsets, data.shape[1])] = data
