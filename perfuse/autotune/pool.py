"""`TuningProcessPool`: workers that run candidates, so that none can harm the process that tunes.

There is one worker, or one for each visible GPU. A worker that a candidate takes down is replaced
for the next one; the candidate's time is infinity, and the reason is kept.
"""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from perfuse import config
from perfuse.autotune import wire
from perfuse.autotune.outcome import LATE, Fate, Outcome, timed
from perfuse.autotune.worker_process import WorkerProcess
from perfuse.config import Settings
from perfuse.environment import child_environment
from perfuse.forking import ForkLock
from perfuse.logs import channel

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
IDLE_SECONDS = 60.0  # after which workers, and the GPU memory they hold, are released
LOG = channel("tuning")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolRules:
    """How many workers there are, and what they may take."""

    devices: tuple[str | None, ...]  # what each worker sees as its GPUs; None: what this one does
    limit_s: float
    most_bytes: int

    @staticmethod
    def of(settings: Settings) -> PoolRules:
        devices = visible_devices() if settings.autotune_multi_device else ()
        most_bytes = settings.tune_worker_bytes or _machine_bytes() * 3 // 4
        return PoolRules(devices or (None,), float(settings.tune_timeout_s) or math.inf, most_bytes)


def visible_devices() -> tuple[str, ...]:
    """The GPUs that this process may use, as the variable names them."""
    named = child_environment({}).get(CUDA_VISIBLE_DEVICES)
    if named is not None:
        return tuple(named.split(","))
    return tuple(str(number) for number in range(torch.cuda.device_count()))


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _Seat:
    """The place of one worker: its device, and the process that sits there now."""

    def __init__(self, device: str | None, rules: PoolRules) -> None:
        self._device = device
        self._rules = rules
        self._worker: WorkerProcess | None = None
        self._is_closed = False
        self.num_started = 0

    def worker(self) -> WorkerProcess:
        """A worker that takes requests; wire.NoMessage if none can be started."""
        if self._is_closed:
            raise wire.NoMessage("the pool was terminated")
        if self._worker is None or not self._worker.is_usable:
            changes = {} if self._device is None else {CUDA_VISIBLE_DEVICES: self._device}
            environment = child_environment(changes)
            self._worker = WorkerProcess(environment, self._rules.most_bytes)
            self.num_started += 1
        return self._worker

    def ask(self, request: Any) -> Outcome:
        """Have a request answered, by a new worker if the last one is gone."""
        try:
            worker = self.worker()
            worker.wait_until_ready()
        except (wire.NoMessage, OSError) as error:
            self._end()
            return Outcome(Fate.NOT_RUN, detail=f"no worker could be started: {error}")
        return worker.ask(request, self._rules.limit_s)

    def interrupt(self) -> None:
        """End the worker while another thread may wait for its answer."""
        self._is_closed = True
        worker = self._worker
        if worker is not None:
            worker.interrupt()

    def close(self) -> None:
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def forget(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.forget()


class TuningProcessPool:
    """Runs benchmark requests in worker processes."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings
        self._lock = ForkLock()
        self._seats: list[_Seat] = []
        self._idle: threading.Timer | None = None
        self.reasons: dict[Any, str] = {}  # of the last `benchmark`: why a choice has no time
        _POOLS.add(self)

    def initialize(self) -> None:
        """Start the workers, all at once."""
        with self._lock:
            if self._seats:
                return
            rules = PoolRules.of(self._settings or config.snapshot())
            self._seats = [_Seat(device, rules) for device in rules.devices]
            for seat in self._seats:
                seat.worker()

    def benchmark(self, choices: Sequence[T]) -> dict[T, float]:
        """The time of each choice, as its request `bmreq` measures it; infinity where it failed."""
        requests = [choice.bmreq for choice in choices]  # type: ignore[attr-defined]
        outcomes = [timed(outcome) for outcome in self.run(requests)]
        found = dict(zip(choices, outcomes, strict=True))
        self.reasons = {choice: o.reason for choice, o in found.items() if o.reason}
        for choice, reason in self.reasons.items():
            LOG.warning("candidate %s: %s", choice, reason)
        return {choice: outcome.milliseconds for choice, outcome in found.items()}

    def run(
        self,
        requests: Sequence[Any],
        deadline: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
        advance: Callable[[], object] = lambda: None,
    ) -> list[Outcome]:
        """The outcome of each request; one that is not begun by the deadline is not run."""
        self.initialize()
        outcomes = [LATE] * len(requests)
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(requests)):
            waiting.put(number)

        def serve(seat: _Seat) -> None:
            while clock() < deadline:
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    return
                outcomes[number] = seat.ask(requests[number])
                advance()

        with self._lock:
            self._stop_waiting()
            _in_threads(serve, self._seats[: max(1, len(requests))])
            self._wait_for_idle()
        return outcomes

    def _wait_for_idle(self) -> None:
        self._idle = threading.Timer(IDLE_SECONDS, self.terminate)
        self._idle.daemon = True
        self._idle.start()

    def _stop_waiting(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = None

    @property
    def num_started(self) -> int:
        """The number of processes that were started, replacements included."""
        return sum(seat.num_started for seat in self._seats)

    def terminate(self) -> None:
        """End all workers, busy or not; the next request starts new ones."""
        for seat in self._seats:
            seat.interrupt()
        with self._lock:
            seats, self._seats = self._seats, []
            self._stop_waiting()
        for seat in seats:
            seat.close()

    def forget(self) -> None:
        """Leave the workers to the process that started them."""
        self._idle = None  # its thread is not in this process
        seats, self._seats = self._seats, []
        for seat in seats:
            seat.forget()


def _in_threads(serve: Callable[[_Seat], None], seats: Sequence[_Seat]) -> None:
    """Serve each seat, the first in this thread."""
    threads = [threading.Thread(target=serve, args=(seat,), daemon=True) for seat in seats[1:]]
    for thread in threads:
        thread.start()
    serve(seats[0])
    for thread in threads:
        thread.join()


_POOLS: weakref.WeakSet[TuningProcessPool] = weakref.WeakSet()
_SHARED: dict[PoolRules, TuningProcessPool] = {}
_SHARED_LOCK = ForkLock()


def shared_pool(settings: Settings) -> TuningProcessPool:
    """The pool that all compiles of this process under these rules use."""
    rules = PoolRules.of(settings)
    with _SHARED_LOCK:
        if rules not in _SHARED:
            _SHARED[rules] = TuningProcessPool(settings)
        return _SHARED[rules]


def terminate_all() -> None:
    """End the workers of every pool."""
    for pool in list(_POOLS):
        pool.terminate()


def _after_fork() -> None:
    """In a forked process: the workers belong to the parent."""
    for pool in list(_POOLS):
        pool.forget()


atexit.register(terminate_all)
os.register_at_fork(after_in_child=_after_fork)
