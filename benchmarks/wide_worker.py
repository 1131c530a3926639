"""A worker process of `benchmarks.wide`: one row, then it is gone."""

from __future__ import annotations

from benchmarks.turns import working
from tests.harness.pool import RETIRE, Result, Task, serve


def handle(task: Task) -> Result:
    with working() as turn:
        # Only now: importing is work too, and takes seconds of it.
        from benchmarks.wide_measure import measured, why

        try:
            result = measured(task, turn)
        except Exception as error:
            result = {"status": "error", "message": why(error)}
    return result | {RETIRE: True}


if __name__ == "__main__":
    serve(handle)
