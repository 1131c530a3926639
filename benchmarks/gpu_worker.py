"""A worker process of `benchmarks.gpu`: one case a task, measured on the device it is told.

Three times of a contestant, medians of interleaved rounds:

- `ms`: between two events, the L2 cache flushed before, in a row of its own calls; where the host
  is slower than the device, its time is in it, as it is for a user who calls nothing else and in
  `triton.testing.do_bench`
- `device_ms`: one call with work queued ahead, so that the host is never waited for
- `host_us`: wall time of a call in a row of calls nobody waits for
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case, Problem, bytes_moved, num_bytes
from benchmarks.contest import (
    Reading,
    Step,
    Steps,
    copy_step,
    first_calls,
    step_of,
    take_turns,
    wrong_results,
)
from benchmarks.gpu_cases import gpu_cases
from benchmarks.turns import TURN, my_turn
from tests.harness.devices import is_healthy, synchronize
from tests.harness.pool import RETIRE, Result, Task, serve

WAIT_S = 200.0  # for those that never get through their first calls
FLUSH_BYTES = 256 << 20  # five times the L2 of an H200
HOST_CALLS = 100
LEAD_CALLS, ROW_CALLS = 2, 5
CYCLES_PER_S = 2.0e9
MEGA = 1e6


class Stopwatch:
    """The milliseconds of a call between two events; wall time where the device is the CPU."""

    def __init__(self, device: str, steps: Steps, *, is_ahead: bool) -> None:
        self.device = device
        num_bytes = FLUSH_BYTES if device == "cuda" else 8
        self.flush = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.host_s = {n: host_seconds(s, device) for n, s in steps.items()}
        self.is_ahead = is_ahead

    def __call__(self, name: str, step: Step) -> Reading:
        if self.device != "cuda":
            spent_ms = host_seconds(step, self.device, 1) * 1e3
            return lambda: spent_ms
        if not self.is_ahead:
            return self.in_a_row(step)
        self.flush.zero_()
        torch.cuda._sleep(int((2 * self.host_s[name] + 1e-4) * CYCLES_PER_S))
        return self.between_events(step)

    def in_a_row(self, step: Step) -> Reading:
        """The median; the first calls still have what was queued before, or nothing, ahead."""
        torch.cuda.synchronize()
        readings = []
        for _ in range(LEAD_CALLS + ROW_CALLS):
            self.flush.zero_()
            readings.append(self.between_events(step))
        return lambda: statistics.median(reading() for reading in readings[LEAD_CALLS:])

    def between_events(self, step: Step) -> Reading:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        step()
        ended.record()
        return lambda: elapsed_ms(began, ended)


def elapsed_ms(began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    ended.synchronize()
    return float(began.elapsed_time(ended))


def host_seconds(step: Step, device: str, num_calls: int = 3) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(num_calls):
        step()
    spent = (time.perf_counter() - began) / num_calls
    synchronize(device)
    return spent


def measure(case: Case, task: Task) -> Result:
    device = task["device"]
    # Only made there: a default device that stays in force costs every call of a function.
    with torch.device(device):
        problem = case.build()
    steps = {backend: step_of(problem, backend) for backend in task["backends"]}
    results, first_s, failures = first_calls(problem, steps, lambda: synchronize(device))
    failures |= wrong_results(case, problem, results)
    moved = bytes_moved(case, problem, results["eager"])
    del results
    wait_for_others(task)
    with my_turn():
        return measured(case, problem, steps, moved, task) | {
            "failures": failures,
            "first_s": {name: round(s, 3) for name, s in first_s.items()},
            "bytes": moved if case.is_memory_bound else None,
        }


def wait_for_others(task: Task) -> None:
    """Until all cases that compile together have done so."""
    if TURN not in os.environ:
        return
    folder = Path(os.environ[TURN]).parent
    (folder / f"{task['case']}.compiled").touch()
    deadline = time.monotonic() + WAIT_S
    while len(list(folder.glob("*.compiled"))) < task["num_together"]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)


def measured(case: Case, problem: Problem, steps: Steps, moved: int, task: Task) -> Result:
    device, budget_s = task["device"], task["budget_s"]
    result: Result = {
        "status": "pass",
        "name": case.name,
        "kind": case.kind,
        "what": case.what,
    }
    if device == "cuda":
        result["memory_mb"] = {n: memory_of(problem, s) for n, s in steps.items()}
    if case.kind == "overhead":
        return {**result, "host_us": host_times(steps, device, budget_s)}
    if case.is_memory_bound:
        with torch.device(device):
            steps["copy"] = copy_step(moved)
    return {**result, **device_times(steps, device, budget_s)}


def device_times(steps: Steps, device: str, budget_s: float) -> dict[str, Any]:
    for step in steps.values():
        for _ in range(3):
            step()
    clocks = {"ms": False, "device_ms": True}
    return {
        key: take_turns(steps, budget_s / 2, Stopwatch(device, steps, is_ahead=is_ahead))
        for key, is_ahead in clocks.items()
    }


def host_times(steps: Steps, device: str, budget_s: float) -> dict[str, Any]:
    def clock(name: str, step: Step) -> Reading:
        spent_us = host_seconds(step, device, HOST_CALLS) * 1e6
        return lambda: spent_us

    return take_turns(steps, budget_s, clock)


def memory_of(problem: Problem, step: Step) -> dict[str, float]:
    """Megabytes at the peak of a step, its arguments and the model's weights counted in."""
    if isinstance(problem.function, torch.nn.Module):
        problem.function.zero_grad(set_to_none=True)
        fixed = num_bytes(problem.args, list(problem.function.parameters()))
    else:
        fixed = num_bytes(problem.args)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before + fixed
    del kept
    return {"peak": round(peak / MEGA, 1)}


def warm_up(backends: list[str], device: str) -> None:
    """Pay the costs of a process (imports, compiler pools, contexts) before the first case."""
    x = torch.randn(64, 64, device=device, requires_grad=True)
    for backend in backends:
        if backend == "eager":
            continue
        try:
            candidate = torch.compile(lambda t: (t.sin() * 3).sum(), backend=backend.split(":")[0])
            candidate(x).backward()
            synchronize(device)
        except Exception:
            continue  # each case will tell


def handle(task: Task, is_warm: set[str]) -> Result:
    device = task["device"]
    torch._dynamo.reset()
    if not is_warm:
        warm_up(task["backends"], device)
        is_warm.add(device)
    try:
        result = measure(gpu_cases(task["shrink"])[task["case"]], task)
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        result = {"status": "error", "message": message}
        wait_for_others(task)  # they wait for this case too
    gc.collect()
    if device == "cuda" and is_healthy(device):
        torch.cuda.empty_cache()
    return {**result, RETIRE: not is_healthy(device)}


def handler() -> Callable[[Task], Result]:
    is_warm: set[str] = set()
    return lambda task: handle(task, is_warm)


if __name__ == "__main__":
    serve(handler())
