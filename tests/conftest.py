"""Options shared by the test folders."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

# Read when perfuse is imported: a lowering that breaks fails the test instead of running in ATen.
os.environ.setdefault("PERFUSE_VERIFY", "1")
# Read when PyTorch loads OpenMP: threads that wait sleep instead of spinning. Two test processes
# with two threads each on two cores otherwise spend most of their time waiting for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# Files whose tests share what takes seconds to make: libraries, other processes, packages. Each of
# them runs in one process (`--dist loadgroup`), which makes it once.
TESTS = Path(__file__).parent
SHARING = tuple(
    TESTS / f"{name}.py"
    for name in (
        "behaviour/test_artefact",
        "behaviour/test_attacks",
        "behaviour/test_faults",
        "behaviour/test_fp8_training",
        "behaviour/test_native_artefact",
        "behaviour/test_processes",
        "behaviour/test_warm_start",
        "faults/test_candidates",
        "sweep/test_sweep",
        "unit/autotune/test_pool",
        "unit/autotune/test_redis",
        "unit/budget/test_choose",
        "unit/report/test_memory",
        "unit/test_gemm",
        "unit/test_logs",
        "unit/test_simd",
    )
)


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


def pytest_collection_finish() -> None:
    """Leave imports and collected tests out of garbage collections, a twentieth of all time."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path in SHARING:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
