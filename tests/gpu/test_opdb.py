"""The operator database on a GPU: float32 with backward, bfloat16, int64 and bool."""

from __future__ import annotations

import pytest

from tests.gpu.judge import judge
from tests.harness.devices import gpu_device, use_carried_packages
from tests.harness.pool import Result, Task

use_carried_packages()
pytest.importorskip("expecttest", reason="see tests/opdb/run.py: it can be carried along")

from tests.opdb.rows import GPU_DTYPES, Row, rows  # noqa: E402

WORKER = "tests.opdb.worker"
SAMPLES = {"forward": 3, "backward": 2}


def task_of(row: Row) -> Task:
    return {"op": row.op, "dtype": row.dtype, "mode": row.mode, "samples": SAMPLES[row.mode]}


@pytest.mark.parametrize("row", list(rows(GPU_DTYPES, device=gpu_device())), ids=str)
def test_matches_eager(row: Row, outcomes: dict[str, Result]) -> None:
    judge(outcomes.get(str(row)))
