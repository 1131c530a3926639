"""The harness itself: a worker that cannot start would make every row of a run a crash."""

from __future__ import annotations

import torch

from tests.harness.pool import Result, Task, run_tasks
from tests.opdb.check import Outcome, check_row, sample_calls
from tests.opdb.rows import Row, operators
from tests.opdb.run import joined


def test_a_row_of_many_samples_is_several_tasks() -> None:
    row = Row("sum", "float32", "forward")
    whole = check_row(row, "eager", 0)
    assert whole == Outcome("pass") and num_samples(row) > 2
    first = check_row(row, "eager", 0, first=0, most=2)
    assert first == Outcome("pass", num_left=num_samples(row) - 2)
    assert check_row(row, "eager", 0, first=2, most=100) == Outcome("pass")


def num_samples(row: Row) -> int:
    return len(sample_calls(operators()[row.op], torch.float32, row.mode, 0, "cpu"))


def test_parts_of_a_row_are_joined() -> None:
    task = {"op": "sin", "first": 0, "most": 64}
    further, _ = joined(task, {"status": "pass", "message": "", "num_left": 30, "seconds": 2.0})
    assert further is not None and further["first"] == 64
    skipped = {"status": "skip", "message": "", "num_left": 0, "seconds": 1.0}
    assert joined(further, skipped) == (None, {"status": "pass", "message": "", "seconds": 3.0})
    wrong = {"status": "wrong", "message": "so", "num_left": 30, "seconds": 1.0}
    assert joined(task, wrong) == (None, {"status": "wrong", "message": "so", "seconds": 1.0})


def test_a_worker_starts_answers_and_gets_a_further_task_where_a_result_asks_for_one() -> None:
    task = {"op": "sum", "dtype": "float32", "mode": "forward", "backend": "eager"}
    found = []

    def record(task: Task, result: Result) -> Task | None:
        found.append((task["first"], result))
        return task | {"first": 2} if result["num_left"] else None

    first = [task | {"device": "cpu", "samples": 3, "most": 2, "first": 0}]
    run_tasks("tests.opdb.worker", first, jobs=1, timeout_s=120, on_result=record)
    answers = [(number, {k: v for k, v in r.items() if k != "seconds"}) for number, r in found]
    passed = {"status": "pass", "message": ""}
    assert answers == [(0, {**passed, "num_left": 1}), (2, {**passed, "num_left": 0})]
