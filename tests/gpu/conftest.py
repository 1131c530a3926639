"""All here is marked `gpu`. Rows run in worker processes, so that a kernel that breaks the device
ends one worker and not the run:

    pytest -m gpu tests/gpu --gpu-jobs 8 --gpu-time-limit 300

TEST_DEVICE=cpu and TEST_BACKEND=inductor prove the tests themselves where there is no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perfuse.testing import fresh_cache
from tests.harness.backend import default_backend, worker_environment
from tests.harness.devices import gpu_device, is_healthy, is_present
from tests.harness.pool import Result, Task, run_tasks

FOLDER = Path(__file__).parent
TIMEOUT_S = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def own_cache() -> Iterator[None]:
    """The same numbers in every run, and nothing that an earlier test compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with fresh_cache():
        yield


@pytest.fixture(autouse=True)
def device() -> str:
    found = gpu_device()
    if not is_present(found):
        pytest.skip("no GPU")
    if not is_healthy(found):
        pytest.skip("a test before this one broke the device for this process")
    return found


@pytest.fixture(scope="session")
def deadline(request: pytest.FixtureRequest) -> float:
    return time.monotonic() + float(request.config.getoption("--gpu-time-limit"))


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, deadline: float) -> dict[str, Result]:
    """The results of all rows of a module that were asked for, by the row's name."""
    module: Any = request.module
    found: dict[str, Result] = {}
    if not is_present(gpu_device()):
        return found
    common = {"backend": default_backend(), "device": gpu_device()}
    tasks: list[Task] = [
        {**module.task_of(item.callspec.params["row"]), **common, "name": str(row)}
        for item in request.session.items
        if getattr(item, "module", None) is module and hasattr(item, "callspec")
        for row in [item.callspec.params.get("row")]
        if row is not None
    ]
    run_tasks(
        module.WORKER,
        tasks,
        jobs=int(request.config.getoption("--gpu-jobs")),
        timeout_s=TIMEOUT_S,
        on_result=lambda task, result: found.update({task["name"]: result}),
        env=worker_environment(default_backend()),
        time_limit_s=deadline - time.monotonic(),
    )
    return found
