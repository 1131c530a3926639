"""Arithmetic of positions in 32 bits, where it fits: vectors of half the size.

Positions are 64-bit integers, of which a vector takes two registers, and whose conversion to floats
some machines have no instruction for.
"""

from __future__ import annotations

from collections.abc import Callable

from perfuse.ir import expr as ex
from perfuse.ir.atoms import Variable
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.post_order import post_order

Range = tuple[int, int]

_LIMIT = 2**31 - 1
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def in_32_bits(value: Expr) -> Expr:
    """The same value; no variable that it depends on reaches 2**31."""
    return _Narrowing()(value)


class _Narrowing:
    """The parts of a value that were seen so far."""

    def __init__(self) -> None:
        self._narrow: dict[Expr, tuple[Expr, Range]] = {}  # the same in 32 bits
        self._done: dict[Expr, Expr] = {}

    def __call__(self, value: Expr) -> Expr:
        for e in post_order(value, _arguments, self._done.__contains__):
            self._done[e] = self._rewritten(e)
            found = self._narrowed(e) if e.dtype is DType.I64 else None
            if found is not None and found[1][0] >= -_LIMIT and found[1][1] <= _LIMIT:
                self._narrow[e] = found
        return self._done[value]

    def _rewritten(self, e: Expr) -> Expr:
        """A value of the dtype it had."""
        narrow = [self._narrow.get(a) for a in e.args]
        small = [found[0] for found in narrow if found is not None]
        if e.args and len(small) == len(e.args):
            if e.op in _COMPARISONS:
                return ex.apply(e.op, *small)
            if e.op == "cast" and (e.dtype.is_float or e.dtype is DType.I32):
                return ex.cast(small[0], e.dtype)
        args = [self._done[a] for a in _arguments(e)]
        if tuple(args) == e.args or not args:
            return e
        if e.op == "cast":
            return ex.cast(args[0], e.dtype)
        return ex.round_to(args[0], e.attr) if e.op == "round_to" else ex.apply(e.op, *args)

    def _narrowed(self, e: Expr) -> tuple[Expr, Range] | None:
        """A 64-bit integer in 32 bits, and the numbers it may be; None where they are not known."""
        if e.op == "const":
            return ex.const(e.attr, DType.I32), (e.attr, e.attr)
        if e.op == "index":
            known = _range_of_index(e.index)
            return None if known is None else (ex.cast(e, DType.I32), known)
        rule = _RULES.get(e.op)
        chosen = e.args[1:] if e.op == "where" else e.args
        parts = [self._narrow.get(a) for a in chosen]
        if rule is None or any(part is None for part in parts):
            return None
        values, ranges = zip(*(part for part in parts if part is not None), strict=True)
        found = rule(*ranges)
        if found is None:
            return None
        condition = [self._done[e.args[0]]] if e.op == "where" else []
        return ex.apply(e.op, *condition, *values), found


def _arguments(e: Expr) -> tuple[Expr, ...]:
    """The parts that are rewritten: what is drawn or loaded stays as it is."""
    return () if e.op in ("load", "index", "rand_f32", "randn_f32", "randint64") else e.args


def _range_of_index(index: Dim) -> Range | None:
    """The least and the most of a sum of variables."""
    if isinstance(index, int):
        return index, index
    low = high = index.const
    for monomial, factor in index.terms:
        if len(monomial) != 1 or not isinstance(monomial[0], Variable):
            return None
        size = monomial[0].size
        end = factor * (size - 1 if isinstance(size, int) else _LIMIT - 1)
        low, high = low + min(end, 0), high + max(end, 0)
    return low, high


def _products(a: Range, b: Range) -> Range:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _by_positive(rule: Callable[[Range, int], Range]) -> Callable[[Range, Range], Range | None]:
    """A division, whose range is known for one positive divisor."""
    return lambda a, b: rule(a, b[0]) if b[0] == b[1] > 0 else None


_RULES: dict[str, Callable[..., Range | None]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _products,
    "neg": lambda a: (-a[1], -a[0]),
    "abs": lambda a: (0, max(-a[0], a[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "where": lambda a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "mod": _by_positive(lambda a, divisor: (0, divisor - 1)),
    "floordiv": _by_positive(lambda a, divisor: (a[0] // divisor, a[1] // divisor)),
}
