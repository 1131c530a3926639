"""Kinds of launch records: how a row of the tables is passed to a driver, and interpreted.

A new kind of launch is a row class, two functions and a row of `KINDS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perfuse.codegen.host.tables import (
    FillRow,
    GpuTables,
    HostCallRow,
    KeptRow,
    LaunchRow,
    MappedLaunchRow,
)

if TYPE_CHECKING:
    from perfuse.runtime.driver import Arguments, Driver
    from perfuse.runtime.frame import GpuFrame
    from perfuse.runtime.interpreted import Interpreter


@dataclass(frozen=True, slots=True)
class RecordKind:
    """One kind: `words` fill a Record of launcher.cpp, `run` does the same in the interpreter."""

    name: str
    row: type[Any]
    words: Callable[[Driver, Arguments, int, Any], tuple[int, ...]]
    run: Callable[[Interpreter, GpuFrame, int, Any], None]


KINDS: list[RecordKind] = [
    RecordKind(
        "launch",
        LaunchRow,
        lambda driver, arguments, number, row: driver.launch_words(arguments, number, row),
        lambda interpreter, frame, number, row: interpreter.interpret(frame, number, row),
    ),
    RecordKind(
        "mapped launch",
        MappedLaunchRow,
        lambda driver, arguments, number, row: driver.launch_words(arguments, number, row),
        lambda interpreter, frame, number, row: interpreter.refuse(row),
    ),
    RecordKind(
        "fill",
        FillRow,
        lambda driver, arguments, number, row: arguments.fill_words(number, row),
        lambda interpreter, frame, number, row: frame.fill(number, row),
    ),
    RecordKind(
        "call",
        HostCallRow,
        lambda driver, arguments, number, row: driver.call_words(arguments, row),
        lambda interpreter, frame, number, row: interpreter.units[row.unit].run(frame, row),
    ),
]


def kind_of(row: Any) -> RecordKind:
    return next(kind for kind in KINDS if isinstance(row, kind.row))


def document_of(tables: GpuTables) -> dict[str, Any]:
    """The tables as plain data."""
    every: tuple[Any, ...] = tables.records
    rows = [{"kind": kind_of(row).name, **dataclasses.asdict(row)} for row in every]
    return {**dataclasses.asdict(tables), "records": rows}


def tables_of(document: dict[str, Any]) -> GpuTables:
    """The tables from which `document_of` made this."""
    return GpuTables(
        device=str(document["device"]),
        records=tuple(_record_of(**row) for row in document["records"]),
        segments=tuple((int(first), int(count)) for first, count in document["segments"]),
        kept=tuple(KeptRow(**row) for row in document["kept"]),
        written=tuple(document["written"]),
        unfit=str(document["unfit"]),
        is_dynamic=bool(document["is_dynamic"]),
    )


def _record_of(kind: str, **fields: Any) -> Any:
    row = {known.name: known.row for known in KINDS}[kind]
    return row(**{name: _frozen(value) for name, value in fields.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
