"""The cache between processes: shared by many, full for the next one, rebuilt when damaged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.scripts import COMPILE, finish, start

# By hand: NUM_PROCESSES=32 pytest tests/behaviour/test_processes.py
NUM_PROCESSES = int(os.environ.get("NUM_PROCESSES", "3"))

Used = tuple[Path, list[dict[str, Any]]]

# Nothing but the name of the backend has imported Perfuse before.
NAMED_ON_META = """
import json
import torch

with torch.device("meta"):
    candidate = torch.compile(lambda x: x.sin().cos(), backend="perfuse")
leaf = torch.linspace(-1, 1, 5, requires_grad=True)
candidate(leaf * 2).sum().backward()
wanted = -torch.sin((leaf * 2).sin()) * (leaf * 2).cos() * 2
print(json.dumps({"is_right": torch.allclose(leaf.grad, wanted)}))
"""


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Used:
    """A cache that many processes have filled at once, and what each of them reports."""
    cache = tmp_path_factory.mktemp("used") / "cache"
    running = [start(COMPILE, cache) for _ in range(NUM_PROCESSES)]
    return cache, [finish(p, timeout_s=60.0 * NUM_PROCESSES) for p in running]


def test_many_processes_on_one_empty_cache(used: Used) -> None:
    _, results = used
    assert all(r["is_right"] for r in results)
    assert not any(r["counters"].get("cache.damaged") for r in results)


def test_a_full_cache_compiles_nothing(used: Used) -> None:
    cache, results = used
    assert any(r["counters"].get("build.compiler_runs", 0) > 0 for r in results)
    warm = finish(start(COMPILE, cache))
    assert warm["is_right"]
    assert warm["counters"].get("build.compiler_runs", 0) == 0
    assert warm["counters"].get("build.kernels_compiled", 0) == 0


def test_a_damaged_cache_is_rebuilt(used: Used, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(used[0], tmp_path / "cache"))
    for path in damaged.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert finish(start(COMPILE, damaged))["is_right"]


def test_the_cache_is_private_to_the_user(used: Used) -> None:
    assert used[0].stat().st_mode & 0o077 == 0


def test_imported_where_tensors_have_no_memory(used: Used) -> None:
    assert finish(start(NAMED_ON_META, used[0]))["is_right"]
