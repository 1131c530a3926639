"""Faulty candidates in max-autotune: each compile ends with a right result, and says what happened.

A source from outside proposes one faulty matmul beside the library's. Whatever it does in a worker,
the program is right, inside a limit, and the decision holds the reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import perfuse
from perfuse import config
from perfuse.autotune.pool import terminate_all
from perfuse.candidates.library import CpuMatmul
from perfuse.candidates.source import Source
from perfuse.candidates.sources import SOURCES
from perfuse.decision import Choice
from perfuse.testing import fresh_cache
from tests.faults.faulty_matmuls import FaultyMatmul
from tests.harness.compare import assert_as_good_as_eager

TIMEOUT_S = 30
SETTINGS = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "ATEN,FAULTY",
    "thresholds.tuned_matmul_work": 0,
    "autotune_in_subproc": True,
    "tune_timeout_s": TIMEOUT_S,
    "tune_worker_bytes": 3 << 30,
}

# What the candidate does, and what the record says of it.
ROWS = {
    "segfaults": "crashed: SIGSEGV",
    "hangs": "hung: no answer within",
    "forks and hangs": "hung: no answer within",
    "allocates without end": "ran out of memory",
    "raises": "raised: RuntimeError: too many registers",
    "writes out of bounds": "wrong result: it writes outside of its result",
    "is fast and wrong": "wrong result: its error is",
    "is right only the first time": "wrong result: its error is",
    "is right until it is timed": "wrong result: its error is",
    "raises while it is timed": "raised: RuntimeError: a late error",
    "returns text": "wrong result: its result is a str",
}
SLOW = ("hangs", "forks and hangs")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with fresh_cache():
        yield


@pytest.fixture(scope="module", autouse=True)
def no_workers_left() -> Iterator[None]:
    yield
    terminate_all()


def source(fault: str, path: Path) -> Source:
    choice = Choice("faulty", fault)

    def request(problem: CpuMatmul, choice: Choice, context: Any) -> FaultyMatmul:
        return FaultyMatmul(fault, problem, str(path))

    return Source("FAULTY", lambda target: True, lambda *_: [choice], request)


def refusal(explained: Any, fault: str) -> str:
    """The reason in the record of the faulty candidate."""
    (graph,) = explained.graphs
    (decision,) = graph.decisions
    return {rival.choice.name: rival.refusal for rival in decision.rivals}[fault]


@pytest.mark.parametrize("fault", ROWS)
def test_a_faulty_candidate_costs_time_and_nothing_else(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "child"
    monkeypatch.setattr("perfuse.candidates.sources.SOURCES", [*SOURCES, source(fault, path)])
    a, b = torch.randn(48, 32), torch.randn(32, 40)
    settings = {**SETTINGS, "tune_timeout_s": 8} if fault in SLOW else SETTINGS
    start = time.monotonic()
    with config.patch(settings):
        explained = perfuse.explain(torch.mm, a, b)
        got = torch.compile(torch.mm, backend="perfuse")(a, b)
    assert time.monotonic() - start < 4 * TIMEOUT_S
    assert_as_good_as_eager(got, a @ b, a.double() @ b.double())
    assert refusal(explained, fault).startswith(ROWS[fault])
    if path.exists():
        assert not is_alive(int(path.read_text()))


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


IN_PROCESS = [fault for fault, told in ROWS.items() if told.startswith(("wrong", "raised"))]


@pytest.mark.parametrize("fault", IN_PROCESS)
def test_faults_that_leave_the_process_alive_are_caught_in_it(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("perfuse.candidates.sources.SOURCES", [*SOURCES, source(fault, tmp_path)])
    a, b = torch.randn(48, 32), torch.randn(32, 40)
    with config.patch({**SETTINGS, "autotune_in_subproc": False}):
        explained = perfuse.explain(torch.mm, a, b)
        got = torch.compile(torch.mm, backend="perfuse")(a, b)
    assert_as_good_as_eager(got, a @ b, a.double() @ b.double())
    assert refusal(explained, fault).startswith(ROWS[fault])
