"""The sum of a row that is zero except at one place: that value, without a sweep."""

from __future__ import annotations

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.expr import Expr
from perfuse.ir.program import Axis


def sum_of_one_hot(value: Expr, axis: Axis) -> Expr | None:
    """The sum along an axis, if the value is `where(position == place & ..., v, 0)`."""
    if value.op != "where" or axis.atom is None:
        return None
    condition, there, elsewhere = value.args
    if elsewhere.op != "const" or elsewhere.attr != 0 or axis.atom in there.variables():
        return None
    terms = _terms(condition)
    found = [(t, place) for t in terms if (place := _place(t, axis)) is not None]
    if len(found) != 1 or axis.atom in found[0][1].variables():
        return None
    term, place = found[0]
    others = [t for t in terms if t is not term]
    if any(axis.atom in t.variables() for t in others):
        return None
    inside = ex.apply("ge", place, ex.const(0, place.dtype))
    for other in (ex.apply("lt", place, ex.index_value(axis.size)), *others):
        inside = ex.apply("land", inside, other)
    return ex.apply("where", inside, there, elsewhere)


def _terms(condition: Expr) -> list[Expr]:
    found, pending = [], [condition]
    while pending:
        term = pending.pop()
        if term.op == "land":
            pending += reversed(term.args)
        else:
            found.append(term)
    return found


def _place(term: Expr, axis: Axis) -> Expr | None:
    """The value that a condition compares the position along the axis with."""
    if term.op != "eq":
        return None
    for one, other in (term.args, term.args[::-1]):
        if one.op == "index" and ix.as_atom(one.attr) is axis.atom:
            return other
    return None
