"""The limits of a comparison: they let another rounding pass, and no fault of a few roundings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.harness.compare import complaints, expected_largest, largest_finite

SIZES = (32, 768, 4096)
NUM_DRAWS = 200
ERROR = 1e-4  # of the values, so that the few ulps of the limit do not matter


def normal(num: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, generator=generator, dtype=torch.float64)


def rounded(exact: Tensor, seed: int, factor: float = 1.0) -> Tensor:
    """The exact values in float32, with normal errors."""
    return (exact + factor * ERROR * normal(exact.numel(), seed).reshape(exact.shape)).float()


def lucky(exact: Tensor) -> Tensor:
    """Of many draws, the one whose largest error is smallest against its mean square."""
    draws = [rounded(exact, seed) for seed in range(1, NUM_DRAWS)]
    errors = [(d.double() - exact).abs() for d in draws]
    ratios = [float(e.max() / e.square().mean().sqrt()) for e in errors]
    return draws[ratios.index(min(ratios))]


@pytest.mark.parametrize("num", SIZES)
def test_another_draw_of_the_same_error_passes(num: int) -> None:
    exact = normal(num, 0)
    eager = lucky(exact)
    for seed in range(NUM_DRAWS, 2 * NUM_DRAWS):
        assert not complaints(rounded(exact, seed), eager, exact)


@pytest.mark.parametrize("num", SIZES)
def test_the_expectation_holds(num: int) -> None:
    largest = [largest_finite(normal(num, seed).abs()) for seed in range(NUM_DRAWS)]
    assert sum(largest) / NUM_DRAWS <= expected_largest(normal(num, NUM_DRAWS)) * 1.1


@pytest.mark.parametrize("num", SIZES)
def test_one_element_off_by_a_few_errors_fails(num: int) -> None:
    exact = normal(num, 0)
    got = rounded(exact, 2)
    got[num // 2] = float(exact[num // 2]) + 10 * ERROR
    assert "1 of" in complaints(got, rounded(exact, 1), exact)[0]


@pytest.mark.parametrize("num", SIZES)
def test_errors_four_times_as_large_fail(num: int) -> None:
    exact = normal(num, 0)
    assert complaints(rounded(exact, 2, factor=4), rounded(exact, 1), exact)


def test_swapped_rows_fail() -> None:
    exact = normal(768, 0).reshape(24, 32)
    got = rounded(exact, 2)
    got[[3, 4]] = got[[4, 3]]
    assert complaints(got, rounded(exact, 1), exact)


def test_a_neighbour_in_place_of_an_element_fails() -> None:
    exact = normal(768, 0)
    got = rounded(exact, 2)
    got[100] = got[101]
    assert "1 of" in complaints(got, rounded(exact, 1), exact)[0]


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_one_rounding_of_the_result_gives_nothing_away(dtype: torch.dtype) -> None:
    """Eager is exact but for the rounding to its dtype: the limit is what it was without luck."""
    exact = 1 + normal(4096, 0).abs() / 200
    eager = exact.to(dtype)
    ulp = torch.finfo(dtype).eps
    assert complaints((exact + 6 * ulp).to(dtype), eager, exact)


def test_a_sum_that_cancels_in_float64_may_leave_a_rounding() -> None:
    exact = torch.tensor([0.0, 0.5], dtype=torch.float64)
    got = torch.tensor([2.0**-56, 0.5], dtype=torch.float64)
    assert not complaints(got, exact, exact, eps=2.0**-23)
    assert complaints(got + 2.0**-40, exact, exact, eps=2.0**-23)


def test_the_largest_of_several_draws_counts() -> None:
    """One element is far larger than the others, and eager happened to hit it."""
    exact = normal(768, 0)
    exact[5] = 1000.0
    sizes = exact.abs().clamp_min(1.0)
    draws = [((exact + ERROR * sizes * normal(768, seed)).float(), exact) for seed in range(1, 20)]
    eager, got = rounded(exact, 20), exact.float()
    got[5] += ERROR * 1000
    assert complaints(got, eager, exact)
    assert not complaints(got, eager, exact, draws=draws)
    got[5] += 10 * ERROR * 1000
    assert complaints(got, eager, exact, draws=draws)


def test_a_draw_of_another_branch_does_not_count() -> None:
    exact = normal(768, 0)
    got = rounded(exact, 2)
    got[100] += 20 * ERROR
    assert complaints(got, rounded(exact, 1), exact, draws=[(exact.float() + 1, exact)])
