"""Common axes: what `refine` splits multiplies back to the sizes it was given."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfuse.ir import index as ix
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis
from perfuse.schedule import domain

N = ix.symbol("n", 2)
EXAMPLES = settings(max_examples=200, deadline=None, derandomize=True)
# Both lists group the same factors, each in its own way: so a common refinement exists.
FACTORS = st.lists(st.sampled_from([2, 3, 4, 5]), min_size=1, max_size=6)


def grouped(factors: list[int], cuts: set[int]) -> list[int]:
    sizes = [1]
    for place, factor in enumerate(factors):
        if place in cuts:
            sizes.append(1)
        sizes[-1] *= factor
    return sizes


@EXAMPLES
@given(FACTORS, st.sets(st.integers(1, 5)), st.sets(st.integers(1, 5)))
def test_parts_make_up_each_size(factors: list[int], cut_a: set[int], cut_b: set[int]) -> None:
    first, second = grouped(factors, cut_a), grouped(factors, cut_b)
    found = domain.refine(first, second)
    if found is not None:
        check(first, second, *found)


@EXAMPLES
@given(st.lists(st.integers(1, 12), max_size=4), st.lists(st.integers(1, 12), max_size=4))
def test_only_equal_products_have_common_axes(first: list[int], second: list[int]) -> None:
    found = domain.refine(first, second)
    if math.prod(first) != math.prod(second):
        assert found is None
    elif found is not None:
        check(first, second, *found)


def check(
    first: list[int], second: list[int], sizes: list[Dim], parts_a: list[list[int]],
    parts_b: list[list[int]],
) -> None:  # fmt: skip
    for given_sizes, parts in ((first, parts_a), (second, parts_b)):
        assert [ix.product([sizes[p] for p in ps]) for ps in parts] == given_sizes
        assert [p for ps in parts for p in ps] == list(range(len(sizes)))


@EXAMPLES
@given(FACTORS)
def test_refining_by_the_factors_gives_the_factors(factors: list[int]) -> None:
    found = domain.refine([math.prod(factors)], factors)
    assert found == (factors, [list(range(len(factors)))], [[i] for i in range(len(factors))])


@EXAMPLES
@given(FACTORS)
def test_joined_axes_count_through(sizes: list[int]) -> None:
    """Stepping through the axes, innermost fastest, is stepping through their product."""
    variables = domain.axis_names(sizes)
    total = domain.joined(sizes, variables, range(len(sizes)))
    for place, variable in enumerate(variables):
        atom = ix.as_atom(variable)
        assert atom is not None
        assert ix.coefficient_of(total, atom) == math.prod(sizes[place + 1 :])
    assert ix.bounds(total) == (0, math.prod(sizes) - 1)


ROWS: list[tuple[list[Dim], list[Dim], list[Dim] | None]] = [
    ([4096, 1024], [8, 512, 1024], [8, 512, 1024]),
    ([6, 4], [4, 6], None),
    ([N, 64], [N, 8, 8], [N, 8, 8]),
    ([ix.mul(N, 8), 4], [N, 32], [N, 8, 4]),
    ([N, 4], [ix.mul(N, 4)], [N, 4]),
    ([N], [ix.add(N, 1)], None),
    ([0, 4], [4, 0], None),
    ([], [], []),
    ([2], [], None),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_rows(row: tuple[list[Dim], list[Dim], list[Dim] | None]) -> None:
    found = domain.refine(row[0], row[1])
    assert (None if found is None else found[0]) == row[2]


def test_axes_stand_by_falling_stride() -> None:
    axes = (Axis("a", 3), Axis("b", 4), Axis("c", 5))
    guide = ix.add(ix.var("a", 3), ix.mul(ix.var("c", 5), 3))
    assert [a.name for a in domain.order_by(axes, guide)] == ["c", "b", "a"]
