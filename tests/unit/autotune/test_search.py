"""The search under a simulated clock: noise, disturbances, ties, budgets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfuse.autotune.search import (
    Estimate,
    Rules,
    estimates,
    first_within,
    turns,
    undecided,
    wall_timer,
)

BAND = 0.02
RULES = Rules(margin=1.0, budget_s=math.inf, fewest_rounds=5, most_rounds=150, band=BAND)


@dataclass
class Machine:
    """A clock that rivals move: normal noise, and now and then a disturbance."""

    noise: float = 0.0
    outliers: float = 0.0
    seed: int = 0
    now: float = 0.0
    num_runs: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def clock(self) -> float:
        return self.now

    def run(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.num_runs[name] = self.num_runs.get(name, 0) + 1
            taken = seconds * max(0.5, self.random.gauss(1.0, self.noise))
            if self.random.random() < self.outliers:
                taken *= self.random.uniform(1.2, 5.0)
            self.now += taken

        return run

    def search(self, seconds: dict[str, float], rules: Rules = RULES) -> str:
        runs = {name: self.run(name, s) for name, s in seconds.items()}
        times = turns(runs, rules, wall_timer(self.clock), self.clock)
        assert rules.band is not None
        return first_within({n: e.seconds for n, e in estimates(times).items()}, rules.band)


def problem(seed: int) -> dict[str, float]:
    """Rivals of random times, some of them equal."""
    draw = random.Random(seed)
    times = [math.exp(draw.uniform(0, 0.8)) for _ in range(draw.randint(2, 8))]
    if draw.random() < 0.3:
        times[-1] = times[0]
    return {f"rival{i}": 1e-4 * t for i, t in enumerate(times)}


def test_two_searches_agree_in_spite_of_noise() -> None:
    agreed = 0
    for seed in range(200):
        rivals = problem(seed)
        first, second = (Machine(0.03, 0.05, seed=1000 * seed + k).search(rivals) for k in (1, 2))
        agreed += first == second
        assert rivals[first] <= 1.06 * min(rivals.values())
    assert agreed >= 190


TIMES = st.lists(st.floats(1e-6, 1e-2), min_size=1, max_size=8)


@given(TIMES)
@settings(max_examples=200, deadline=None)
def test_without_noise_the_first_within_the_band_wins(times: list[float]) -> None:
    rivals = {f"rival{i}": t for i, t in enumerate(times)}
    winner = Machine().search(rivals)
    expected = first_within(rivals, BAND)
    # Times a rounding error from the edge of the band may be on either side of it.
    assert (
        winner == expected
        or rivals[winner] == pytest.approx((1 + BAND) * min(times), rel=1e-6)
        or rivals[expected] == pytest.approx((1 + BAND) * min(times), rel=1e-6)
    )


@given(TIMES, st.integers(0, 1 << 20))
@settings(max_examples=100, deadline=None)
def test_a_search_ends_and_measures_every_rival(times: list[float], seed: int) -> None:
    machine = Machine(0.03, 0.05, seed)
    machine.search({f"rival{i}": t for i, t in enumerate(times)})
    assert len(machine.num_runs) == len(times)
    assert max(machine.num_runs.values()) <= RULES.most_rounds
    assert min(machine.num_runs.values()) >= RULES.fewest_rounds


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0, 0.3)), min_size=1, max_size=6))
def test_the_leader_of_what_is_undecided_is_the_first_that_can_win(
    rows: list[tuple[float, float]],
) -> None:
    found = {str(i): Estimate(seconds, error) for i, (seconds, error) in enumerate(rows)}
    left = undecided(found, BAND)
    best = first_within({name: e.seconds for name, e in found.items()}, BAND)
    assert not left or len(left) > 1
    assert not left or int(left[0]) <= int(best), "whoever may win is never left out"


def test_slow_rivals_are_left_out_early() -> None:
    machine = Machine(0.03, 0.05)
    rivals = {"slow": 3e-4, "close": 1.0e-4, "fast": 0.985e-4, "slower": 9e-4}
    machine.search(rivals)
    assert machine.num_runs["slow"] == machine.num_runs["slower"] == RULES.fewest_rounds
    assert machine.num_runs["close"] > RULES.fewest_rounds


def test_equal_rivals_go_to_the_first_proposed() -> None:
    for seed in range(20):
        rivals = {"a": 1e-4, "b": 1e-4, "c": 0.999e-4}
        assert Machine(0.03, 0.05, seed).search(rivals) == "a"


def test_when_the_time_is_over_the_best_so_far_wins() -> None:
    machine = Machine(0.03, 0.05)
    rules = Rules(margin=1.0, budget_s=1.0, fewest_rounds=1, most_rounds=1000, band=1e-9)
    assert machine.search({"a": 0.5, "b": 0.4, "c": 0.1}, rules) == "c"
    assert machine.now < 3.0
