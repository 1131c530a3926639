"""Sizes as numbers: symbols are replaced by their likely values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Division, Quotient, Symbol
from perfuse.ir.index import Dim

UNKNOWN_SIZE = 4096  # of a symbol without a hint

Hints = Mapping[str, int]


def have_hints(dims: Iterable[Dim], hints: Hints) -> bool:
    """Whether the likely values of all symbols in these sizes are known."""
    return all(isinstance(a, Symbol) and a.name in hints for d in dims for a in ix.atoms_of(d))


def value_of(dim: Dim, hints: Hints) -> int:
    """The value of a size, under likely values of its symbols."""
    if isinstance(dim, int):
        return dim
    total = dim.const
    for atoms, factor in dim.terms:
        for atom in atoms:
            factor *= _atom_value(atom, hints)
        total += factor
    return total


def _atom_value(atom: Atom, hints: Hints) -> int:
    if isinstance(atom, Division):
        a, b = value_of(atom.numerator, hints), max(value_of(atom.divisor, hints), 1)
        return a // b if isinstance(atom, Quotient) else a % b
    return hints.get(atom.name, UNKNOWN_SIZE) if isinstance(atom, Symbol) else UNKNOWN_SIZE
