"""The launches of a GPU host program as plain data, which the runtime turns into records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UNKNOWN = -1  # a number that the host program writes into the table G before the launch


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """One launch: which entries of P and S are passed, and over which grid."""

    kernel: str
    pointers: tuple[int, ...]
    sizes: tuple[int, ...]
    grid: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class FillRow:
    """Memory filled with one element's bytes, before the launch that comes after it."""

    pointer: int
    pattern: str  # hexadecimal
    count: int


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
    records: tuple[LaunchRow | FillRow, ...]
    segments: tuple[tuple[int, int], ...]  # first record, and how many
    kept: tuple[KeptRow, ...]
    written: tuple[int, ...]  # inputs that the program writes to
    unfit: str = ""  # why its launches cannot be recorded and replayed
    is_dynamic: bool = False  # its inputs come in many sizes


def tables_of(document: dict[str, Any]) -> GpuTables:
    """The tables that `dataclasses.asdict` made this of."""
    return GpuTables(
        device=str(document["device"]),
        records=tuple(_record_of(row) for row in document["records"]),
        segments=tuple((int(first), int(count)) for first, count in document["segments"]),
        kept=tuple(KeptRow(**row) for row in document["kept"]),
        written=tuple(document["written"]),
        unfit=str(document["unfit"]),
        is_dynamic=bool(document["is_dynamic"]),
    )


def _record_of(row: dict[str, Any]) -> LaunchRow | FillRow:
    if "kernel" not in row:
        return FillRow(**row)
    x, y, z = row["grid"]
    return LaunchRow(row["kernel"], tuple(row["pointers"]), tuple(row["sizes"]), (x, y, z))
