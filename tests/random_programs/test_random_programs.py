"""Random programs in CI: fixed seeds, and hypothesis steering the same generator."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.backend import default_backend
from tests.random_programs.check import check_program
from tests.random_programs.generate import from_seed, generate

NUM_SEEDS = 60
NUM_HYPOTHESIS = 15
# Seeds that once failed stay here for ever.
REGRESSION_SEEDS: tuple[int, ...] = (1794, 5094, 7078)


@pytest.mark.parametrize("seed", (*range(NUM_SEEDS), *REGRESSION_SEEDS))
def test_matches_eager(seed: int) -> None:
    program = from_seed(seed)
    verdict = check_program(program, default_backend())
    assert verdict.status in ("pass", "skip"), f"{verdict.message}\n\n{program.standalone()}"


@settings(
    max_examples=NUM_HYPOTHESIS,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(rng=st.randoms(use_true_random=False))
def test_hypothesis_finds_no_counterexample(rng: Random) -> None:
    program = generate(rng)
    verdict = check_program(program, default_backend())
    assert verdict.status in ("pass", "skip"), f"{verdict.message}\n\n{program.standalone()}"


def test_same_seed_same_program() -> None:
    assert from_seed(5).source() == from_seed(5).source()
