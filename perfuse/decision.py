"""Choices and decisions: how an operation is computed, and the measurements behind it.

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

    source: str  # the kind of implementation: "library", "tile"
    name: str
    options: tuple[tuple[str, Plain], ...] = ()

    @staticmethod
    def from_json(document: dict[str, Any]) -> Choice:
        options = tuple((name, value) for name, value in document["options"])
        return Choice(document["source"], document["name"], options)

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

    def measured(self) -> str:
        if self.median_us is None:
            return f"refused: {self.refusal}"
        return f"{self.median_us:,.1f} us, spread {self.spread_us:,.1f}"


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
        rivals = tuple(
            Rival(**{**row, "choice": Choice.from_json(row["choice"])})
            for row in document["rivals"]
        )
        chosen = Choice.from_json(document["chosen"])
        decision = Decision(document["subject"], chosen, rivals, document["reason"])
        str(decision)  # which raises where times are not numbers
        return decision

    def __str__(self) -> str:
        rivals = "; ".join(f"{r.choice} {r.measured()}" for r in self.rivals)
        return f"{self.subject}: {self.chosen} of {rivals}"
