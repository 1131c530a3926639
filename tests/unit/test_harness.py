"""The harness itself: a worker that cannot start would make every row of a run a crash."""

from __future__ import annotations

from tests.harness.backend import worker_environment
from tests.harness.pool import Worker


def test_a_worker_of_the_operator_database_starts_and_answers() -> None:
    worker = Worker("tests.opdb.worker", env=worker_environment("eager"))
    task = {"op": "sin", "dtype": "float32", "mode": "forward", "backend": "eager"}
    try:
        result = worker.run({**task, "device": "cpu", "samples": 1}, timeout_s=120)
    finally:
        worker.stop()
    assert result == {"status": "pass", "message": ""}
