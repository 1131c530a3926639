"""Index algebra: what it simplifies is still the same number, and what it claims is true."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom
from perfuse.ir.index import Dim
from tests.unit.ir.algebra import (
    DIVISORS,
    PLACES,
    POLYNOMIALS,
    SAMPLES,
    VARIABLES,
    WIDTH,
    K,
    N,
    Sample,
    evaluate,
)

ROW = ix.var("row", 60)
A, B, M, W = (VARIABLES[name] for name in "abmw")
PLANE = ix.mul(WIDTH, ix.add(N, K))
IN_PLANE = ix.var("p", PLANE)
EXAMPLES = settings(max_examples=80, deadline=None, derandomize=True)


def atom(index: Dim) -> Atom:
    found = ix.as_atom(index)
    assert found is not None
    return found


def no_values(value: Any) -> Any:
    raise AssertionError(f"{value} in an index without values")


@EXAMPLES
@given(SAMPLES)
def test_means_what_python_means(sample: Sample) -> None:
    for place in PLACES:
        assert evaluate(sample.index, place) == sample.at(place), place


@EXAMPLES
@given(POLYNOMIALS, st.randoms(use_true_random=False))
def test_equal_polynomials_are_one_object(sample: Sample, random: Any) -> None:
    if isinstance(sample.index, int):
        return
    terms = list(sample.index.terms)
    random.shuffle(terms)
    total: Dim = sample.index.const
    for monomial, coefficient in terms:
        factors = list(monomial)
        random.shuffle(factors)
        part: Dim = coefficient
        for factor in factors:
            part = ix.mul(ix._of(factor), part)
        total = ix.add(part, total)
    assert total is sample.index


@EXAMPLES
@given(POLYNOMIALS, POLYNOMIALS, POLYNOMIALS)
def test_laws_hold_by_identity(x: Sample, y: Sample, z: Sample) -> None:
    a, b, c = x.index, y.index, z.index
    assert same(ix.add(a, ix.add(b, c)), ix.add(ix.add(c, a), b))
    assert same(ix.mul(a, ix.add(b, c)), ix.add(ix.mul(b, a), ix.mul(c, a)))
    assert ix.add(a, ix.mul(a, -1)) == 0


def same(a: Dim, b: Dim) -> bool:
    return a is b or (isinstance(a, int) and a == b)


@EXAMPLES
@given(SAMPLES)
def test_bounds_hold_every_value(sample: Sample) -> None:
    low, high = ix.bounds(sample.index)
    for place in PLACES:
        value = sample.at(place)
        assert evaluate(low, place) <= value, place
        assert high is None or value <= evaluate(high, place), place


@EXAMPLES
@given(SAMPLES, DIVISORS)
def test_claims_are_true(sample: Sample, size: Sample) -> None:
    if ix.is_nonnegative(sample.index):
        assert all(sample.at(place) >= 0 for place in PLACES)
    if ix.is_within(sample.index, size.index):
        assert all(0 <= sample.at(place) < size.at(place) for place in PLACES)


@EXAMPLES
@given(SAMPLES, DIVISORS)
def test_exact_division(sample: Sample, divisor: Sample) -> None:
    quotient = ix.exact_div(sample.index, divisor.index)
    if quotient is not None:
        assert same(ix.mul(quotient, divisor.index), sample.index)


@EXAMPLES
@given(SAMPLES)
def test_coefficient_is_the_stride(sample: Sample) -> None:
    for name in "abm":
        stride = ix.coefficient_of(sample.index, atom(VARIABLES[name]))
        if stride is None:
            continue
        for place in PLACES:
            at_zero = sample.at({**place, name: 0})
            assert sample.at(place) == at_zero + place[name] * evaluate(stride, place)


@EXAMPLES
@given(SAMPLES, SAMPLES)
def test_substitution_is_evaluation_elsewhere(sample: Sample, other: Sample) -> None:
    # The replacement has to keep what is known of the variable: it stays below the same size.
    inside = ix.mod(other.index, 4)
    made = ix.substitute(sample.index, {atom(B): inside}, no_values)
    for place in PLACES:
        assert evaluate(made, place) == sample.at({**place, "b": other.at(place) % 4}), place


def test_bounds_of_a_product_with_a_negative_factor() -> None:
    unknown = ix.floordiv(ix.add(N, ix.mul(K, -1)), 3)
    low, high = ix.bounds(ix.mul(unknown, A))
    assert isinstance(low, int) and low <= -(2**60) and high is None
    assert ix.bounds(ix.mul(ix.floordiv(-1, N), A)) == (-2, 0)


@EXAMPLES
@given(SAMPLES)
def test_text_is_python(sample: Sample) -> None:
    for place in PLACES[:: len(PLACES) // 8]:
        assert eval(repr(sample.index), {}, place) == sample.at(place), place


SIMPLIFIED: list[tuple[Dim, Dim]] = [
    (ix.var("one", 1), 0),
    (ix.floordiv(ix.add(ix.mul(A, 4), B), 4), A),
    (ix.mod(ix.add(ix.mul(A, 4), B), 4), B),
    (ix.floordiv(B, 4), 0),
    (ix.mod(A, 3), A),
    (ix.floordiv(ix.floordiv(ix.var("x", 60), 3), 4), ix.floordiv(ix.var("x", 60), 12)),
    (ix.add(ix.mul(ix.floordiv(ix.var("x", 60), 5), 5), ix.mod(ix.var("x", 60), 5)),
     ix.var("x", 60)),
    (ix.floordiv(ix.add(ix.mul(A, N), M), N), A),
    (ix.mod(ix.add(ix.mul(A, N), M), N), M),
    (ix.mod(ix.mod(ix.var("x", 60), 12), 4), ix.mod(ix.var("x", 60), 4)),
    (ix.floordiv(ix.add(ix.mul(N, 5), -1), N), 4),
    (ix.mod(ix.add(ix.mul(N, 5), -1), N), ix.add(N, -1)),
    # Rows of a size that is itself a sum: 2*n + k - 2 of them, in planes of n + k rows.
    (ix.floordiv(ix.add(ix.mul(A, WIDTH), W), WIDTH), A),
    (ix.mod(ix.add(ix.mul(A, WIDTH), W), WIDTH), W),
    (ix.floordiv(ix.add(ix.mul(A, PLANE), IN_PLANE), WIDTH),
     ix.add(ix.mul(A, ix.add(N, K)), ix.floordiv(IN_PLANE, WIDTH))),
    (ix.mod(ix.floordiv(ix.add(ix.mul(A, PLANE), IN_PLANE), WIDTH), ix.add(N, K)),
     ix.floordiv(IN_PLANE, WIDTH)),
    (ix.floordiv(ix.add(ix.mul(A, PLANE), IN_PLANE), ix.mul(PLANE, 3)), 0),
    (ix.mod(ix.floordiv(ix.var("x", ix.mul(N, K)), N), K),
     ix.floordiv(ix.var("x", ix.mul(N, K)), N)),
    # Rows of four elements, n of them in a plane: what joins batch and rows divides no element.
    (ix.floordiv(ix.add(ix.mul(ROW, 4), B), ix.mul(N, 4)), ix.floordiv(ROW, N)),
    (ix.mod(ix.add(ix.mul(ROW, 4), B), ix.mul(N, 4)), ix.add(ix.mul(ix.mod(ROW, N), 4), B)),
    (ix.floordiv(ix.mul(ROW, 4), ix.mul(N, 6)), ix.floordiv(ix.mul(ROW, 2), ix.mul(N, 3))),
    (ix.floordiv(ix.add(ix.mul(ROW, 4), B), ix.add(ix.mul(N, 4), ix.mul(K, 8))),
     ix.floordiv(ROW, ix.add(N, ix.mul(K, 2)))),
    (ix.add(ix.mul(ix.mul(ix.floordiv(ix.add(ix.mul(ROW, 4), B), ix.mul(N, 4)), N), 4),
            ix.mul(ix.mod(ROW, N), 4)), ix.mul(ROW, 4)),
]  # fmt: skip


@pytest.mark.parametrize("pair", SIMPLIFIED, ids=lambda pair: repr(pair[1]))
def test_simplifies(pair: tuple[Dim, Dim]) -> None:
    assert same(*pair)


PRINTED = [
    (ix.add(ix.mul(A, 4), B), "4*a + b"),
    (ix.add(ix.mul(ix.mul(M, N), -1), 3), "-m*n + 3"),
    (ix.add(ix.floordiv(ix.var("x", 9), 2), 1), "(x // 2) + 1"),
    (ix.mod(ix.var("x", 9), 2), "(x % 2)"),
    (ix.floordiv(ix.add(ix.var("x", 9), 1), 2), "((x + 1) // 2)"),
    (ix.mod(ix.var("x", 9), ix.mul(N, 3)), "(x % (3*n))"),
]


@pytest.mark.parametrize("row", PRINTED, ids=lambda row: row[1])
def test_prints(row: tuple[Dim, str]) -> None:
    assert repr(row[0]) == row[1]


COEFFICIENTS = [
    (ix.add(ix.mul(A, 4), B), A, 4),
    (ix.add(ix.mul(M, N), M), M, ix.add(N, 1)),
    (ix.floordiv(ix.var("x", 9), 2), ix.var("x", 9), None),
    (ix.mul(A, A), A, None),
    (ix.add(B, 7), A, 0),
]


@pytest.mark.parametrize("row", COEFFICIENTS, ids=lambda row: repr(row[0]))
def test_coefficients(row: tuple[Dim, Dim, Dim | None]) -> None:
    index, variable, expected = row
    found = ix.coefficient_of(index, atom(variable))
    assert found is expected or found == expected


EVEN: list[tuple[Dim, Dim, Dim | None]] = [
    (12, 4, 3), (12, 5, None), (12, 0, None), (ix.mul(N, 6), 3, ix.mul(N, 2)),
    (ix.mul(N, 6), N, 6), (ix.add(ix.mul(N, 2), 1), 2, None),
    (ix.mul(ix.mul(N, N), 4), N, ix.mul(N, 4)),
    (ix.add(N, 1), ix.add(N, 1), 1), (N, ix.add(N, 1), None),
]  # fmt: skip


@pytest.mark.parametrize("row", EVEN, ids=lambda row: f"{row[0]!r} by {row[1]!r}")
def test_exact_division_rows(row: tuple[Dim, Dim, Dim | None]) -> None:
    assert ix.exact_div(row[0], row[1]) == row[2]


def test_product_does_not_mind_the_order() -> None:
    for order in itertools.permutations([2, N, 3, ix.add(N, 1)]):
        assert ix.product(order) is ix.product([2, 3, N, ix.add(N, 1)])
