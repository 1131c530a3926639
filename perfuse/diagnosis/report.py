"""`Report`: the result of `perfuse.doctor()`, checks of a machine and what each backend can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType

from perfuse.diagnosis.screen import lines_of, renderables
from perfuse.version import VERSION

# "ok"; "note": works, with something to know; "absent": not there, and nothing needs it;
# "problem": should be fixed.
State = Literal["ok", "note", "absent", "problem"]
# "runs" here; "builds" code for a device that is not present; "no".
Ability = Literal["runs", "builds", "no"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one probe: what it found, and what to do about it."""

    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the report."""

    section: str
    name: str
    state: State
    found: str
    advice: str = ""
    is_essential: bool = False  # without it, nothing can be compiled for a CPU


@dataclass(frozen=True, slots=True)
class BackendState:
    """The ability of one backend for one kind of device on this machine."""

    backend: str
    device: str
    ability: Ability
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The state of a machine: `print` it, or query its rows."""

    checks: tuple[Check, ...]
    backends: tuple[BackendState, ...]

    @property
    def is_usable(self) -> bool:
        """Whether code can be compiled for a CPU and run here."""
        return not any(c.is_essential and c.state == "problem" for c in self.checks)

    @property
    def problems(self) -> tuple[Check, ...]:
        """The checks that found something to fix."""
        return tuple(check for check in self.checks if check.state == "problem")

    def check(self, name: str, section: str | None = None) -> Check:
        """The row of this name; KeyError if there is none."""
        for row in self.checks:
            if row.name == name and section in (None, row.section):
                return row
        raise KeyError(name)

    def backend(self, name: str, device: str) -> BackendState:
        """The row of a backend and a kind of device; KeyError if there is none."""
        for row in self.backends:
            if (row.backend, row.device) == (name, device):
                return row
        raise KeyError((name, device))

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "perfuse": VERSION,
            "is_usable": self.is_usable,
            "checks": [asdict(check) for check in self.checks],
            "backends": [asdict(backend) for backend in self.backends],
        }

    def __str__(self) -> str:
        return "\n".join(lines_of(self))

    __repr__ = __str__

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield from renderables(self)
