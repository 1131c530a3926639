"""The list of programs on a GPU, against eager there and float64."""

from __future__ import annotations

import pytest

from tests.behaviour.row import Behaviour
from tests.gpu.judge import judge
from tests.gpu.programs import LARGE, SMALL
from tests.harness.pool import Result, Task

WORKER = "tests.gpu.worker"


def task_of(row: Behaviour) -> Task:
    return {"program": row.name}


@pytest.mark.parametrize("row", (*SMALL, *LARGE), ids=str)
def test_matches_eager(row: Behaviour, outcomes: dict[str, Result]) -> None:
    judge(outcomes.get(str(row)))
