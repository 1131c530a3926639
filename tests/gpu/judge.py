"""Turn a worker's result into the outcome of its row's test."""

from __future__ import annotations

import pytest

from tests.harness.pool import Result


def judge(result: Result | None) -> None:
    if result is None:
        pytest.skip("not reached within --gpu-time-limit")
    if result["status"] in ("skip", "capture"):
        pytest.skip(f"{result['status']}: {result['message']}")
    assert result["status"] == "pass", f"{result['status']}: {result['message']}"
