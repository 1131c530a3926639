"""Where a GPU's time goes: the longest kernels of one step, by contestant.

python -m benchmarks.gpu_profile --only '^bert-base$' --backends inductor perfuse
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import Case
from benchmarks.contest import step_of
from benchmarks.gpu_cases import gpu_cases

WARM_UP, STEPS = 3, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", required=True, help="regular expression on the names of cases")
    parser.add_argument("--backends", nargs="+", default=["eager", "inductor", "perfuse"])
    parser.add_argument("--rows", type=int, default=10)
    arguments = parser.parse_args()
    for case in gpu_cases().values():
        if re.search(arguments.only, case.name):
            for backend in arguments.backends:
                show(case, backend, arguments.rows)


def show(case: Case, backend: str, rows: int) -> None:
    """Run a few steps under the profiler and print what took longest on the device."""
    with torch.device("cuda"):
        problem = case.build()
    step = step_of(problem, backend)
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as watched:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    found = device_times(watched.events())
    total = sum(time for time, _ in found.values())
    print(f"{case.name} {backend}: {total / STEPS:.0f} us in kernels a step")
    for name, (time, count) in sorted(found.items(), key=lambda row: -row[1][0])[:rows]:
        print(f"  {time / STEPS:8.0f} us {count / STEPS:6.1f}x  {name[:90]}")


def device_times(events: Any) -> dict[str, tuple[float, int]]:
    """Microseconds and number of launches by kernel."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            time, count = found[event.name]
            found[event.name] = (time + event.device_time_total, count + 1)
    return found


if __name__ == "__main__":
    main()
