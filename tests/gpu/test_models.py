"""Real architectures on a GPU, forward and a training step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.gpu.judge import judge
from tests.harness.pool import Result, Task
from tests.models.zoo import FURTHER, NAMED

WORKER = "tests.models.worker"


@dataclass(frozen=True, slots=True)
class Row:
    architecture: str
    train: bool

    def __str__(self) -> str:
        return f"{self.architecture}-{'train' if self.train else 'forward'}"


def task_of(row: Row) -> Task:
    return {"architecture": row.architecture, "train": row.train}


ROWS = [Row(a.name, train) for a in (*NAMED, *FURTHER) for train in (False, True)]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_matches_eager(row: Row, outcomes: dict[str, Result]) -> None:
    judge(outcomes.get(str(row)))
