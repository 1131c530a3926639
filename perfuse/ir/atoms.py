"""Atoms: the indivisible factors of an index, interned, so that equal ones are one object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from perfuse.ir.expr import Expr
    from perfuse.ir.index import Dim


class Atom:
    """A variable, a symbol, a value read from data, a quotient or a remainder."""

    __slots__ = ("__weakref__", "sort_key")
    sort_key: str

    def __repr__(self) -> str:
        return self.sort_key


class Variable(Atom):
    """A loop variable in [0, size)."""

    __slots__ = ("name", "size")
    name: str
    size: Dim


class Symbol(Atom):
    """A size known only at run time, at least `lower`."""

    __slots__ = ("is_from_data", "lower", "name")
    name: str
    lower: int
    is_from_data: bool  # a library call of the program computes it


class Indirect(Atom):
    """An index read from data at run time, already wrapped and checked to be in [0, size)."""

    __slots__ = ("size", "value")
    value: Expr
    size: Dim


class Division(Atom):
    """The common base of quotients and remainders."""

    __slots__ = ("divisor", "numerator")
    numerator: Dim
    divisor: Dim

    @property
    def operands(self) -> tuple[Dim, Dim]:
        return self.numerator, self.divisor


class Quotient(Division):
    """numerator // divisor, rounded down."""

    __slots__ = ()


class Remainder(Division):
    """numerator % divisor, with the sign of the divisor."""

    __slots__ = ()


A = TypeVar("A", bound=Atom)
_ATOMS: WeakValueDictionary[tuple[Any, ...], Atom] = WeakValueDictionary()


def interned(kind: type[A], text: str, **fields: Any) -> A:
    """The one atom of this kind with these fields."""
    key = (kind, *fields.values())
    found = _ATOMS.get(key)
    if found is None:
        found = kind()
        found.sort_key = text
        for name, value in fields.items():
            setattr(found, name, value)
        _ATOMS[key] = found
    assert isinstance(found, kind)
    return found
