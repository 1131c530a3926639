"""Options shared by the test folders."""

from __future__ import annotations

import gc
import os

import pytest

# Read when perfuse is imported: a lowering that breaks fails the test instead of running in ATen.
os.environ.setdefault("PERFUSE_VERIFY", "1")
# Read when PyTorch loads OpenMP: threads that wait sleep instead of spinning. Two test processes
# with two threads each on two cores otherwise spend most of their time waiting for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--opdb-full", action="store_true", help="every operator, dtype and many samples"
    )
    parser.addoption("--gpu-jobs", type=int, default=8, help="worker processes on one GPU")
    parser.addoption(
        "--gpu-time-limit",
        type=float,
        default=float("inf"),
        help="seconds for all rows of the GPU tests; what is not reached is skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: left out unless asked for with -m slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that hold an address: processes that share a run would collect other tests."""
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"names differ from process to process, give ids: {unstable}")


def pytest_collection_finish() -> None:
    """Leave imports and collected tests out of garbage collections: 5 % of the operator rows."""
    gc.freeze()
