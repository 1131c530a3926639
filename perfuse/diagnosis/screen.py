"""A report as text: a table for each kind of device, and one for the backends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from perfuse.diagnosis.report import Report

CPU, CUDA, ROCM, SURROUNDINGS = "CPU", "CUDA", "ROCm", "Cache and settings"
SECTIONS = (CPU, CUDA, ROCM, SURROUNDINGS)

MARKS = {"ok": "ok", "note": "note", "absent": "-", "problem": "NO"}
ABILITIES = {"runs": "runs", "builds": "builds", "no": "-"}
STYLES = {"NO": "bold red", "note": "yellow", "ok": "green", "runs": "green"}

ReportRow = tuple[str, ...]  # a mark, names, and at the end what was found and what to do


def _parts(report: Report) -> Iterator[tuple[str, list[ReportRow]]]:
    """The titles and rows of the tables."""
    for section in SECTIONS:
        rows = [check for check in report.checks if check.section == section]
        yield section, [(MARKS[c.state], c.name, _told(c.found, c.advice)) for c in rows]
    backends: list[ReportRow] = [
        (ABILITIES[b.ability], b.backend, b.device, _told(b.found, b.advice))
        for b in report.backends
    ]
    yield "Backends (builds: for a device that is not here)", backends


def _told(found: str, advice: str) -> str:
    return f"{found}\n-> {advice}" if advice else found


def _verdict(report: Report) -> str:
    if not report.is_usable:
        return "Perfuse cannot compile for this CPU: see the rows marked NO."
    if report.problems:
        return "Perfuse works on this CPU; the rows marked NO can be fixed."
    return "Perfuse works on this machine."


def lines_of(report: Report) -> Iterator[str]:
    """The report without colours or wrapping."""
    for title, rows in _parts(report):
        yield title
        for *names, text in rows:
            head = f"  {names[0]:7}{''.join(map('{:18}'.format, names[1:]))}"
            first, *rest = text.split("\n")
            yield head + first
            yield from (" " * len(head) + line for line in rest)
    yield _verdict(report)


def renderables(report: Report) -> Iterator[RenderableType]:
    """The report as tables."""
    for title, rows in _parts(report):
        yield _table(title, rows)
        yield ""
    yield Text(_verdict(report), "bold")


def _table(title: str, rows: Iterable[ReportRow]) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    for *names, text in rows:
        if not table.columns:
            for width in (6, 16, 5)[: len(names)]:
                table.add_column(width=width, overflow="fold")
            table.add_column(overflow="fold")
        mark = Text(names[0], STYLES.get(names[0], ""))
        table.add_row(mark, *map(Text, names[1:]), Text(text))
    return table
