"""One case on the CPU in one process.

python -m benchmarks.interleaved CASE --backends eager inductor perfuse --budget 6
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.cases import Case, bytes_moved
from benchmarks.catalogue import catalogue
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

MIN_BATCH_S = 0.002  # shorter calls are timed several at a time
LONG_S = 0.02  # what others left in the caches does not matter to longer ones
BEYOND_CACHES = 256 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--backends", nargs="+", default=["eager", "inductor", "perfuse"])
    parser.add_argument("--budget", type=float, default=6.0, help="seconds of measuring")
    arguments = parser.parse_args()
    print(json.dumps(measure(catalogue()[arguments.case], arguments.backends, arguments.budget)))


def measure(case: Case, backends: Sequence[str], budget_s: float) -> dict[str, Any]:
    problem = case.build()
    steps = {backend: step_of(problem, backend) for backend in backends}
    results, _, failures = first_calls(problem, steps, lambda: None)
    failures |= wrong_results(case, problem, results)
    moved = bytes_moved(case, problem, results["eager"])
    if case.is_memory_bound:
        steps["copy"] = copy_step(moved)
    return {
        "name": case.name,
        "kind": case.kind,
        "what": case.what,
        "bytes": moved if case.is_memory_bound else None,
        "memory_gb_s": memory_gb_s() if case.is_memory_bound else None,
        "failures": failures,
        "times_ms": take_turns(steps, budget_s, CpuClock(steps)),
    }


class CpuClock:
    """Time of a call in a row of a contestant's own: wall time, or by the clock given.

    A first call, untimed, brings back what the others drove out of the caches. It would count for
    half where a row has two calls and a tenth where it has ten, and `e5m2_dq` be twice as slow
    in one process as in the next.
    """

    def __init__(self, steps: Steps, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.batches = dict.fromkeys(steps, 1)
        self.is_led = dict.fromkeys(steps, True)
        for name, step in steps.items():
            step()
            once_s = self(name, step)() / 1e3
            self.batches[name] = max(1, round(MIN_BATCH_S / max(once_s, 1e-7)))
            self.is_led[name] = once_s < LONG_S

    def __call__(self, name: str, step: Step) -> Reading:
        if self.is_led[name]:
            step()
        began = self.now()
        for _ in range(self.batches[name]):
            step()
        spent_ms = (self.now() - began) / self.batches[name] * 1e3
        return lambda: spent_ms


def memory_gb_s() -> float:
    """How fast bytes are copied (read and written) that no cache can hold."""
    copy = copy_step(BEYOND_CACHES)
    steps = {"copy": copy}
    return BEYOND_CACHES / take_turns(steps, 0.2, CpuClock(steps))["copy"]["median"] / 1e6


if __name__ == "__main__":
    main()
