"""`Scope`: nested places where statements go, and what is already computed there."""

from __future__ import annotations

from typing import Generic, TypeVar

from perfuse.codegen.writer import Writer
from perfuse.ir.atoms import Atom
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim

V = TypeVar("V")


class Scope(Generic[V]):
    """A place where statements go, and the variables that are known there."""

    def __init__(self, writer: Writer, variables: frozenset[Atom], parent: Scope[V] | None) -> None:
        self.writer = writer
        self.variables: frozenset[Atom] = (
            variables if parent is None else variables | parent.variables
        )
        self.parent = parent
        self.known: dict[Expr, V] = {}
        self.known_indices: dict[Dim, str] = {}

    def find(self, value: Expr) -> V | None:
        scope: Scope[V] | None = self
        while scope is not None:
            found = scope.known.get(value)
            if found is not None:
                return found
            scope = scope.parent
        return None

    def home_of(self, variables: frozenset[Atom]) -> Scope[V]:
        """The outermost scope where all these variables are known."""
        scope = self
        while scope.parent is not None and variables <= scope.parent.variables:
            scope = scope.parent
        return scope
