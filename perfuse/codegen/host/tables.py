"""The launches of a GPU host program as plain data, which the runtime turns into records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

UNKNOWN = -1  # a number that the host program writes into the table G before the launch


class Record(Protocol):
    """A row of the tables: plain data; runtime/records.py lists the kinds."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Three numbers of the table G, UNKNOWN where the host program writes them."""


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """One launch: which entries of P and S are passed, and over which grid."""

    kernel: str
    pointers: tuple[int, ...]
    sizes: tuple[int, ...]
    grid: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class MappedLaunchRow:
    """A launch whose last arguments are tensor maps, made of addresses in P."""

    kernel: str
    pointers: tuple[int, ...]
    sizes: tuple[int, ...]
    grid: tuple[int, int, int]
    # Entry of P, bytes after it, bytes of an element, rows, columns, bytes from a row to the next,
    # rows and columns of a block.
    maps: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class HostCallRow:
    """One host call: a function of a library of its own, given entries of P with offsets."""

    unit: str
    pointers: tuple[int, ...]
    offsets: tuple[int, ...]  # in bytes
    sizes: tuple[int, ...]
    factors: tuple[float, ...]

    @property
    def grid(self) -> tuple[int, int, int]:
        return 1, 1, 1


@dataclass(frozen=True, slots=True)
class FillRow:
    """Memory filled with one element's bytes, before the launch that comes after it."""

    pointer: int
    pattern: str  # hexadecimal
    count: int

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.count, 1, 1


@dataclass(frozen=True, slots=True)
class KeptRow:
    """Memory that is filled once and lives as long as the program."""

    pointer: int
    pattern: str
    count: int


@dataclass(frozen=True, slots=True)
class GpuTables:
    """Records in order, and the runs of them that one call launches."""

    device: str
    records: tuple[Record, ...]
    segments: tuple[tuple[int, int], ...]  # first record, and how many
    kept: tuple[KeptRow, ...]
    written: tuple[int, ...]  # inputs that the program writes to
    unfit: str = ""  # why its launches cannot be recorded and replayed
    is_dynamic: bool = False  # its inputs have dynamic sizes
