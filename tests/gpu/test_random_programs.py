"""Random programs on a GPU, fixed seeds."""

from __future__ import annotations

import pytest

from tests.gpu.judge import judge
from tests.harness.pool import Result, Task

WORKER = "tests.random_programs.worker"
NUM_SEEDS = 200


def task_of(row: int) -> Task:
    return {"seed": row, "shrink": False}


@pytest.mark.parametrize("row", range(NUM_SEEDS))
def test_matches_eager(row: int, outcomes: dict[str, Result]) -> None:
    judge(outcomes.get(str(row)))
