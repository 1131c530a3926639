"""Choices: how one operation is computed, as plain data that goes to JSON and back."""

from __future__ import annotations

from dataclasses import dataclass

Plain = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Choice:
    """One implementation of an operation: a library call or a tile, with its parameters."""

    source: str  # who implements it: "library", "tile"
    name: str
    options: tuple[tuple[str, Plain], ...] = ()

    def __str__(self) -> str:
        return self.name


def library(op: str) -> Choice:
    """The choice of a library call: aten.mm.out."""
    return Choice("library", op)
