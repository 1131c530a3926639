"""Index expressions beside plain Python arithmetic, and every place at which to compare the two."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Division, Quotient, Symbol, Variable
from perfuse.ir.index import Dim

Place = dict[str, int]  # a value for each variable and for the symbols

N, K = ix.symbol("n", 2), ix.symbol("k", 2)
WIDTH = ix.add(ix.add(ix.mul(N, 2), K), -2)  # what a transposed convolution makes of sizes
SIZES: dict[str, Dim] = {"a": 3, "b": 4, "m": N, "w": WIDTH}
VARIABLES = {name: ix.var(name, size) for name, size in SIZES.items()}


@dataclass(frozen=True)
class Sample:
    """An index, the Python text it stands for, and the same computed by Python alone."""

    index: Dim
    text: str
    at: Callable[[Place], int]

    def __repr__(self) -> str:
        return f"{self.text}  ->  {self.index!r}"


def places() -> Iterator[Place]:
    """Every value of the variables (of "w" the outermost), for the least sizes of the symbols."""
    for n, k in ((2, 2), (3, 2), (4, 3)):
        width = 2 * n + k - 2
        for a, b, m in itertools.product(range(3), range(4), range(n)):
            for w in (0, 1, width - 1):
                yield {"n": n, "k": k, "a": a, "b": b, "m": m, "w": w}


PLACES = tuple(places())


def evaluate(index: Dim, place: Place) -> int:
    """The value of an index, read off its terms."""
    if isinstance(index, int):
        return index
    total = index.const
    for monomial, coefficient in index.terms:
        for atom in monomial:
            coefficient *= _evaluate_atom(atom, place)
        total += coefficient
    return total


def _evaluate_atom(atom: Atom, place: Place) -> int:
    if isinstance(atom, Variable | Symbol):
        return place[atom.name]
    assert isinstance(atom, Division)
    numerator, divisor = (evaluate(part, place) for part in atom.operands)
    return numerator // divisor if isinstance(atom, Quotient) else numerator % divisor


def _leaf(name: str) -> Sample:
    symbols = {"n": N, "k": K}
    index = symbols[name] if name in symbols else VARIABLES[name]
    return Sample(index, name, lambda place: place[name])


def _number(value: int) -> Sample:
    return Sample(value, str(value), lambda _: value)


def _add(x: Sample, y: Sample) -> Sample:
    return Sample(ix.add(x.index, y.index), f"({x.text} + {y.text})", lambda p: x.at(p) + y.at(p))


def _mul(x: Sample, y: Sample) -> Sample:
    return Sample(ix.mul(x.index, y.index), f"({x.text} * {y.text})", lambda p: x.at(p) * y.at(p))


def _floordiv(x: Sample, y: Sample) -> Sample:
    text = f"({x.text} // {y.text})"
    return Sample(ix.floordiv(x.index, y.index), text, lambda p: x.at(p) // y.at(p))


def _mod(x: Sample, y: Sample) -> Sample:
    return Sample(ix.mod(x.index, y.index), f"({x.text} % {y.text})", lambda p: x.at(p) % y.at(p))


WIDTHS = _add(_add(_mul(_leaf("n"), _number(2)), _leaf("k")), _number(-2))
NUMBERS = st.integers(-6, 12).map(_number)
LEAVES = st.one_of(st.sampled_from("abmwnk").map(_leaf), NUMBERS)
# What sizes are made of; nothing divides by what may be zero or negative.
DIVISORS = st.one_of(
    st.integers(1, 12).map(_number),
    st.just(_leaf("n")),
    st.integers(2, 4).map(lambda c: _mul(_leaf("n"), _number(c))),
    st.just(_add(_leaf("n"), _number(1))),
    st.just(WIDTHS),
    st.integers(2, 4).map(lambda c: _mul(WIDTHS, _number(c))),
    st.just(_mul(WIDTHS, _add(_leaf("n"), _leaf("k")))),
)


def _grown(inner: st.SearchStrategy[Sample]) -> st.SearchStrategy[Sample]:
    return st.one_of(
        st.builds(_add, inner, inner),
        st.builds(_mul, inner, LEAVES),
        st.builds(_mul, inner, DIVISORS),
        st.builds(_floordiv, inner, DIVISORS),
        st.builds(_mod, inner, DIVISORS),
    )


SAMPLES = st.recursive(LEAVES, _grown, max_leaves=7)
POLYNOMIALS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.builds(_add, inner, inner), st.builds(_mul, inner, inner)),
    max_leaves=7,
)
