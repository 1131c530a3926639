"""Choices and decisions: how an operation is computed, and what was measured to choose that.

Plain data that goes to JSON and back: the store keeps decisions, compiled programs carry them, and
reports show them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

FORMAT = 1  # of the JSON; a decision of another one is measured again
Plain = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Choice:
    """One implementation of an operation: a library call or a tile, with its parameters."""

    source: str  # who implements it: "library", "tile"
    name: str
    options: tuple[tuple[str, Plain], ...] = ()

    @staticmethod
    def from_json(document: dict[str, Any]) -> Choice:
        options = tuple((str(name), _plain(value)) for name, value in document["options"])
        return Choice(_text(document["source"]), _text(document["name"]), options)

    def __str__(self) -> str:
        return self.name


def library(op: str) -> Choice:
    """The choice of a library call: aten.mm.out."""
    return Choice("library", op)


@dataclass(frozen=True, slots=True)
class Rival:
    """A choice that was considered: measured, or refused for a reason."""

    choice: Choice
    best_us: float | None = None
    median_us: float | None = None
    spread_us: float | None = None  # the median distance from the median
    refusal: str = ""

    @staticmethod
    def from_json(document: dict[str, Any]) -> Rival:
        return Rival(
            Choice.from_json(document["choice"]),
            _number(document["best_us"]),
            _number(document["median_us"]),
            _number(document["spread_us"]),
            _text(document["refusal"]),
        )

    def __str__(self) -> str:
        if self.median_us is None:
            return f"{self.choice} refused ({self.refusal})"
        return f"{self.choice} {self.median_us:.1f} us"


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice made by measurement, with every rival, the default first."""

    subject: str  # what was decided on: matmul 64x256x256, kernel k3
    chosen: Choice
    rivals: tuple[Rival, ...]
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_json(document: dict[str, Any]) -> Decision:
        """The decision again; one of `errors.MALFORMED` where it is another format or damaged."""
        if document["format"] != FORMAT:
            raise ValueError(f"a decision of format {document['format']!r}, not {FORMAT}")
        chosen = Choice.from_json(document["chosen"])
        rivals = tuple(map(Rival.from_json, document["rivals"]))
        return Decision(_text(document["subject"]), chosen, rivals, _text(document["reason"]))

    def __str__(self) -> str:
        others = ", ".join(str(r) for r in self.rivals if r.choice != self.chosen)
        chosen = next((r for r in self.rivals if r.choice == self.chosen), self.chosen)
        return f"{self.subject}: {chosen}" + (f"; {others}" if others else "")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text is expected, not {value!r}")
    return value


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _plain(value: Any) -> Plain:
    if value is not None and not isinstance(value, str | int | float | bool):
        raise TypeError(f"a plain value is expected, not {value!r}")
    return value
