"""The cache between processes: shared by many, full for the next one, rebuilt when damaged."""

from __future__ import annotations

import os
from pathlib import Path

from tests.behaviour.scripts import COMPILE, finish, start

# By hand: NUM_PROCESSES=32 pytest tests/behaviour/test_processes.py
NUM_PROCESSES = int(os.environ.get("NUM_PROCESSES", "6"))


def test_many_processes_on_one_empty_cache(tmp_path: Path) -> None:
    running = [start(COMPILE, tmp_path) for _ in range(NUM_PROCESSES)]
    results = [finish(p, timeout_s=60.0 * NUM_PROCESSES) for p in running]
    assert all(r["is_right"] for r in results)
    assert not any(r["counters"].get("cache.damaged") for r in results)
    last = finish(start(COMPILE, tmp_path))
    assert last["is_right"]
    assert last["counters"].get("build.compiler_runs", 0) == 0


def test_a_full_cache_compiles_nothing(tmp_path: Path) -> None:
    cold = finish(start(COMPILE, tmp_path))
    warm = finish(start(COMPILE, tmp_path))
    assert cold["is_right"] and warm["is_right"]
    assert cold["counters"]["build.compiler_runs"] > 0
    assert warm["counters"].get("build.compiler_runs", 0) == 0
    assert warm["counters"].get("build.kernels_compiled", 0) == 0


def test_a_damaged_cache_is_rebuilt(tmp_path: Path) -> None:
    finish(start(COMPILE, tmp_path))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert finish(start(COMPILE, tmp_path))["is_right"]


def test_the_cache_is_private_to_the_user(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    finish(start(COMPILE, cache))
    assert cache.stat().st_mode & 0o077 == 0
