"""Decisions under attack: many processes, killed writers, failing disks, damage, a dying server.

Whatever happens, a question is answered with one of its candidates, by a decision on that question,
without an exception and within a limit.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfuse.autotune.stored import stored_or_measured
from perfuse.cache.decisions import FILE, stored_decisions
from perfuse.cache.lock_file import lock_of, read_lock, write_lock_file
from perfuse.cache.store import Store
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.decision import Question
from perfuse.errors import LockFileError
from perfuse.system import replaced
from tests.harness.faults import FAILING, FAULTS, Double, Fault, Killed
from tests.harness.redis_server import redis_server, server_program
from tests.unit.autotune.questions import context, decision, question

NUM_PROCESSES = 32
QUESTIONS = [question(f"problem {k}") for k in range(12)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that is possible: there, an fsync costs nothing."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path)


def forked(work: Callable[[], None]) -> int:
    """The number of a new process that does this work and ends with 0, or shows its error."""
    pid = os.fork()
    if pid:
        return pid
    try:
        warnings.simplefilter("ignore")
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def ends_of(pids: list[int], limit_s: float = 120.0) -> list[int]:
    """How processes ended; those that take too long are killed."""
    deadline, ends = time.monotonic() + limit_s, {}
    while len(ends) < len(pids):
        for pid in set(pids) - ends.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ends[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [ends[pid] for pid in pids]


def new_store(ctx: Context) -> Context:
    """The context as another process would have it: with a store that is not open yet."""
    return Context(ctx.target, ctx.settings, Counters())


def answer(asked: Question, ctx: Context, rng: random.Random) -> None:
    chosen = rng.choice(asked.candidates)
    made = stored_or_measured(asked, "s", ctx, lambda: decision(asked, chosen), "autotune.measured")
    assert made.question == asked and made.chosen in asked.candidates


def answer_all(ctx: Context, seed: int) -> None:
    rng = random.Random(seed)
    for asked in rng.sample(QUESTIONS, len(QUESTIONS)):
        answer(asked, ctx, rng)


def test_many_processes_on_one_store(folder: Path) -> None:
    ctx = context(folder)
    work = [partial(answer_all, new_store(ctx), seed) for seed in range(NUM_PROCESSES)]
    assert ends_of([forked(w) for w in work]) == [0] * NUM_PROCESSES
    last = new_store(ctx)
    answer_all(last, 0)
    assert last.counters["autotune.local_hit"] == len(QUESTIONS)
    assert last.counters["autotune.measured"] == last.counters["cache.damaged"] == 0


def test_all_processes_agree_afterwards(folder: Path) -> None:
    """Of several that measured at once, the first decision is the one that later ones find."""
    ctx = context(folder)
    work = [partial(answer_all, new_store(ctx), seed) for seed in range(8)]
    assert ends_of([forked(w) for w in work]) == [0] * 8
    found = [list(stored_decisions(Store(folder, 1 << 30))) for _ in range(2)]
    assert found[0] == found[1] and len(found[0]) == len(QUESTIONS)


def test_writers_that_are_killed(folder: Path) -> None:
    ctx = context(folder)

    def write_for_ever(seed: int) -> None:
        own, rng = new_store(ctx), random.Random(seed)
        while True:
            answer(question(f"problem {rng.randrange(500)}"), own, rng)

    rng = random.Random(0)
    for _ in range(4):
        pids = [forked(partial(write_for_ever, rng.randrange(1 << 30))) for _ in range(8)]
        for pid in rng.sample(pids, len(pids)):
            time.sleep(rng.uniform(0, 0.02))
            os.kill(pid, signal.SIGKILL)
        assert ends_of(pids) == [-signal.SIGKILL] * 8
    last = new_store(ctx)
    for k in range(500):
        answer(question(f"problem {k}"), last, rng)
    counts = last.counters
    assert counts["autotune.local_hit"] + counts["autotune.measured"] == 500
    assert counts["autotune.local_hit"] > 0 and counts["cache.damaged"] == 0


def test_lock_files_of_writers_that_are_killed(folder: Path) -> None:
    """The file is one of the complete ones at any moment."""
    path = str(folder / "perfuse.lock")
    versions = [lock_of(decision(q) for q in QUESTIONS[: k + 1]) for k in range(len(QUESTIONS))]
    write_lock_file(path, versions[0])

    def write_for_ever(seed: int) -> None:
        rng = random.Random(seed)
        while True:
            write_lock_file(path, rng.choice(versions))

    for round_ in range(4):
        pids = [forked(partial(write_for_ever, s)) for s in range(4)]
        for pid in pids:
            for _ in range(20):
                assert read_lock(path) in versions
            os.kill(pid, signal.SIGKILL)
        assert ends_of(pids) == [-signal.SIGKILL] * 4, round_
    assert read_lock(path) in versions


@pytest.mark.parametrize("fault", [*FAILING, *FAULTS], ids=lambda fault: str(fault.name))
def test_every_operation_fails_once(fault: Fault, folder: Path) -> None:
    """A disk that is full, read-only, torn or slow, at every operation of a decision."""
    calm = Double()
    with replaced(calm):
        decided_plainly(folder / "calm")
    points = [k for k, name in enumerate(calm.calls) if name in fault.only]
    assert points
    for at in points:
        cache = folder / str(at)
        double = Double(fault, at)
        double.meanwhile = partial(decided_plainly, cache)
        with warnings.catch_warnings(), replaced(double), contextlib.suppress(Killed):
            warnings.simplefilter("ignore")
            decided_plainly(cache)
        decided_plainly(cache)  # as the next process does, on what the first has left behind


def decided_plainly(cache: Path) -> None:
    answer(QUESTIONS[0], context(cache), random.Random(0))


DAMAGES: tuple[Callable[[bytes], bytes], ...] = (
    lambda data: b"",
    lambda data: data[: len(data) // 2],
    lambda data: bytes(len(data)),
    lambda data: data.replace(b"problem 0", b"problem 1"),
    lambda data: data.replace(b"aten.mm.out", b"aten.rm.out"),
    lambda data: b"[" * 100_000,
)


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
@pytest.mark.parametrize("name", [FILE, "manifest.json"])
def test_damaged_entries(folder: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    decided_plainly(folder)
    (path,) = folder.rglob(name)
    path.write_bytes(damage(path.read_bytes()))
    again = context(folder)
    answer(QUESTIONS[0], again, random.Random(1))
    last = context(folder)
    answer(QUESTIONS[0], last, random.Random(1))
    assert last.counters["autotune.local_hit"] == 1


def test_a_damaged_lock_file_gives_no_choice(folder: Path) -> None:
    """Whatever byte is wrong: an error, or exactly the choices that were pinned."""
    path = folder / "perfuse.lock"
    lock = lock_of(decision(q) for q in QUESTIONS[:2])
    write_lock_file(str(path), lock)
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(300):
        place = rng.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([rng.randrange(256)]) + whole[place + 1 :])
        try:
            found = read_lock(str(path))
        except LockFileError:
            continue
        assert found is not None
        assert {n: e.chosen for n, e in found.entries.items()} == {
            n: e.chosen for n, e in lock.entries.items()
        }


@pytest.mark.skipif(server_program() is None, reason="no Redis server")
@pytest.mark.parametrize("has_store", [False, True])
def test_a_server_that_is_killed_in_the_middle(folder: Path, has_store: bool) -> None:
    with redis_server(folder) as server:
        shared: dict[str, Any] = {"autotune_remote_cache": True, "redis_url": server.url}
        shared |= {"autotune_local_cache": has_store}

        def ask(seed: int) -> None:
            ctx, rng = context(folder / str(seed), **shared), random.Random(seed)
            for k in range(300):
                answer(question(f"problem {k}"), ctx, rng)

        start = time.monotonic()
        pids = [forked(partial(ask, s)) for s in range(8)]
        while not server.send("DBSIZE"):
            time.sleep(0.01)
        server.kill()
        assert ends_of(pids) == [0] * 8
        assert time.monotonic() - start < 100


@pytest.mark.skipif(server_program() is None, reason="no Redis server")
def test_many_processes_on_one_server(folder: Path) -> None:
    with redis_server(folder) as server:
        ctx = context(folder, autotune_remote_cache=True, redis_url=server.url,
                      autotune_local_cache=False)  # fmt: skip
        work = [partial(answer_all, new_store(ctx), seed) for seed in range(NUM_PROCESSES)]
        assert ends_of([forked(w) for w in work]) == [0] * NUM_PROCESSES
        assert server.send("DBSIZE") == len(QUESTIONS)
        last = new_store(ctx)
        answer_all(last, 0)
        assert last.counters["autotune.remote_hit"] == len(QUESTIONS)
