"""The choice of a cut: monotone by construction, and cheap."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perfuse import config
from perfuse.budget.choose import choose_cut, choose_within, pick
from perfuse.budget.family import frontier
from perfuse.budget.simulate import simulate
from perfuse.budget.values import Values
from perfuse.context import Context
from perfuse.errors import BudgetWarning, OverBudget
from perfuse.graph.partition import Joint, plain_cut
from tests.unit.budget.joints import joint_of, random_network

peaks_and_budgets = st.tuples(
    st.lists(st.integers(1, 100), min_size=1, max_size=14), st.integers(0, 110), st.integers(0, 110)
)


@settings(max_examples=500, deadline=None)
@given(peaks_and_budgets)
def test_a_smaller_budget_never_takes_more(drawn: tuple[list[int], int, int]) -> None:
    """Even where the order of the frontier, which comes from estimates, is all wrong."""
    peaks, one, other = drawn
    small, large = sorted((one, other))
    guesses = [1] * len(peaks)  # none is ruled out
    less, more = (pick(peaks.__getitem__, guesses, lambda _, b=b: b) for b in (small, large))
    assert peaks[less] <= peaks[more]
    for budget, picked in ((small, less), (large, more)):
        assert (peaks[picked] <= budget) == (min(peaks) <= budget)


def test_the_cheapest_that_fits_is_found_by_halving() -> None:
    peaks = list(range(100, 36, -1))
    asked: list[int] = []

    def peak_of(number: int) -> int:
        asked.append(number)
        return peaks[number]

    assert peaks[pick(peak_of, peaks, lambda _: 70)] == 70
    assert len(set(asked)) <= 8


def within(budget: Any, **others: Any) -> Context:
    return Context.default(config.Settings().with_overrides({"memory_budget": budget, **others}))


@pytest.fixture(scope="module")
def network() -> Joint:
    def stack(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x.sum()

    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(12)]
    return joint_of(stack, torch.randn(4096, 64, requires_grad=True), *weights)


def test_without_pressure_nothing_changes(network: Joint) -> None:
    choice = choose_within(network, within(1.0))
    plain = plain_cut(network, config.Settings())
    assert choice.cut.saved == plain.saved and choice.cut.recomputed == plain.recomputed
    assert choice.fits and choice.unconstrained == choice.timeline.peak


def test_peaks_fall_with_the_budget(network: Joint) -> None:
    choices = [choose_within(network, within(f / 10)) for f in range(10, 2, -1)]
    peaks = [choice.timeline.peak for choice in choices]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.65 * peaks[0]
    assert all(c.timeline.peak <= c.limit for c in choices if c.fits and c.limit)
    # Twelve layers of one size: about as much as the second forward of all but one of them.
    assert len(choices[-1].cut.recomputed) > len(choices[0].cut.recomputed)


def test_estimates_are_near_the_plans(network: Joint) -> None:
    values = Values.of(network)
    context = within(0.5)
    for candidate in frontier(network, values, context.settings):
        saved, wanted = (
            [values.nodes[v] for v in sorted(numbers)]
            for numbers in (candidate.saved, candidate.wanted)
        )
        peak = simulate(network.cut(saved, wanted), context).peak
        assert abs(candidate.estimate.peak - peak) < 0.2 * peak, candidate.name


def test_too_small_a_budget_says_how_low_it_can_go(network: Joint) -> None:
    with pytest.warns(BudgetWarning, match=r"needs at least [\d.]+ MiB \([\d,]+ bytes"):
        choose_cut(network, within("1MB"))
    with pytest.raises(OverBudget, match="over_budget='warn'") as caught:
        choose_cut(network, within("1MB", over_budget="raise"))
    least = caught.value.least_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_cut(network, within(least))[1]
    with pytest.raises(OverBudget):
        choose_cut(network, within(least - 1, over_budget="raise"))


@pytest.mark.parametrize("seed", range(6))
def test_random_graphs(seed: int) -> None:
    fn, args = random_network(seed)
    joint = joint_of(fn, *args)
    peaks = []
    for fraction in (1.0, 0.8, 0.6, 0.4, 0.0):
        choice = choose_within(joint, within(fraction))
        assert choice.fits == (choice.timeline.peak <= (choice.limit or 0))
        for half in (choice.cut.forward, choice.cut.backward):
            half.graph.lint()
        peaks.append(choice.timeline.peak)
    assert peaks == sorted(peaks, reverse=True)
