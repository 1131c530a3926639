"""Workers: what a candidate does to its worker, what is left, and what the next one finds."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfuse import config
from perfuse.autotune import wire
from perfuse.autotune.outcome import Fate, timed
from perfuse.autotune.pool import CUDA_VISIBLE_DEVICES, TuningProcessPool
from tests.unit.autotune import candidates as c
from tests.unit.autotune.slow_import import Quick

LIMITS = {"tune_timeout_s": 6, "tune_worker_bytes": 256 << 20}


@pytest.fixture(scope="module")
def pool() -> Iterator[TuningProcessPool]:
    made = TuningProcessPool(config.Settings().with_overrides(LIMITS))
    made.initialize()
    yield made
    made.terminate()


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    """Whether a process ends soon."""
    for _ in range(100):
        if not is_alive(pid):
            return True
        time.sleep(0.02)
    return False


ROWS: list[tuple[Any, Fate, str, bool]] = [
    (c.Segfaults(), Fate.CRASHED, "SIGSEGV", True),
    (c.Aborts(), Fate.CRASHED, "SIGABRT: assertion `x > 0' failed", True),
    (c.Exits(), Fate.CRASHED, "exit status 7", True),
    (c.Hangs(), Fate.HUNG, "no answer within 6 s", True),
    (c.AllocatesWithoutEnd(), Fate.OUT_OF_MEMORY, "MemoryError", True),
    (c.Raises(), Fate.RAISED, "RuntimeError: too many registers", False),
    (c.WritesToEveryPipe(), Fate.MALFORMED, "not JSON", True),
    (c.Honest(float("nan")), Fate.MALFORMED, "nan is not a time", False),
    (c.Honest(0), Fate.MALFORMED, "0 is not a time", False),
    (c.Honest([1, 2]), Fate.MALFORMED, "[1, 2] is not a time", False),
    (c.Honest(), Fate.MEASURED, "", False),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row[0]).__name__)
def test_a_candidate_that_fails_costs_its_own_time_only(
    row: tuple[Any, Fate, str, bool], pool: TuningProcessPool
) -> None:
    request, fate, reason, is_replaced = row
    before = pool.num_started
    found, after = (timed(outcome) for outcome in pool.run([request, c.Honest(2.5)]))
    assert found.fate is fate and reason in found.detail
    assert found.milliseconds == (1.5 if fate is Fate.MEASURED else math.inf)
    assert after.milliseconds == 2.5
    assert (pool.num_started > before) == is_replaced


def test_imports_do_not_count_as_time_of_a_candidate() -> None:
    pool = TuningProcessPool(config.Settings().with_overrides({"tune_timeout_s": 1}))
    (outcome,) = pool.run([Quick()])
    pool.terminate()
    assert outcome.value == 1.0


def test_what_a_candidate_forks_is_killed(pool: TuningProcessPool, tmp_path: Path) -> None:
    path = tmp_path / "child"
    (outcome,) = pool.run([c.ForksAndHangs(str(path))])
    assert outcome.fate is Fate.HUNG
    assert gone(int(path.read_text()))


def test_a_request_that_cannot_travel_is_refused(pool: TuningProcessPool) -> None:
    class Local:
        pass

    for request in (Local(), lambda: 1, c.Honest(object)):
        assert pool.run([request])[0].fate is Fate.NOT_RUN


def test_nothing_is_begun_after_the_deadline(pool: TuningProcessPool) -> None:
    times = iter([0.0, 5.0])
    first, second = pool.run([c.Honest(), c.Honest()], deadline=3.0, clock=lambda: next(times))
    assert (first.fate, second.fate) == (Fate.MEASURED, Fate.NOT_RUN)


def test_termination_ends_workers_and_another_request_starts_new_ones() -> None:
    pool = TuningProcessPool(config.Settings())
    (pid,) = (outcome.value for outcome in pool.run([c.Pid()]))
    pool.terminate()
    assert not is_alive(pid)
    assert pool.run([c.Pid()])[0].value != pid
    pool.terminate()


def test_idle_workers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfuse.autotune.pool.IDLE_SECONDS", 0.1)
    pool = TuningProcessPool(config.Settings())
    assert gone(pool.run([c.Pid()])[0].value)


def test_each_worker_sees_its_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA_VISIBLE_DEVICES, "3,5")
    pool = TuningProcessPool(config.Settings().with_overrides({"autotune_multi_device": True}))
    slow = [c.SlowEnvironment(CUDA_VISIBLE_DEVICES) for _ in range(4)]
    assert {outcome.value for outcome in pool.run(slow)} == {"3", "5"}
    assert pool.num_started == 2
    pool.terminate()


PARENT = """
import os, sys, threading, time
from perfuse.autotune.pool import TuningProcessPool
from tests.unit.autotune import candidates as c
pool = TuningProcessPool()
print(pool.run([c.Pid()])[0].value, flush=True)
threading.Thread(target=pool.run, args=([c.Hangs()],), daemon=True).start()
time.sleep(0.5)
{end}
"""
ENDS = {"killed": "os.kill(os.getpid(), 9)", "exits": "sys.exit(0)"}


@pytest.mark.parametrize("end", ENDS)
def test_workers_die_with_their_parent_even_when_busy(end: str) -> None:
    command = [sys.executable, "-c", PARENT.format(end=ENDS[end])]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=False)
    assert gone(int(done.stdout))


def test_a_forked_process_leaves_the_workers_alone(pool: TuningProcessPool) -> None:
    (before,) = (outcome.value for outcome in pool.run([c.Pid()]))
    child = os.fork()
    if child == 0:
        pool.terminate()
        os._exit(0)
    os.waitpid(child, 0)
    assert pool.run([c.Pid()])[0].value == before


def test_values_go_to_json_and_back() -> None:
    torch = pytest.importorskip("torch")
    values = [None, True, 1, 0.5, "x", (1, (2,)), [1], {"a": (1,), 2: None}, Fate.HUNG]
    values += [torch.float16, torch.device("cuda:1"), c.Honest((1, 2.0))]
    for value in values:
        assert wire.value_of(wire.document_of(value)) == value
    with pytest.raises(TypeError, match="Tensor"):
        wire.document_of(torch.ones(2))
