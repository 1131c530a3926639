"""Where the GPU's time goes in rows of the wide benchmark: kernels and host, by contestant.

    python -m benchmarks.wide_profile --only 'mpnet/small/forward' --jobs 8 --results DIR

For each contestant: milliseconds of a call, of the device alone, of the host alone, and the kernels
that take longest, with their launches per call. Rows compile side by side and are measured alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.contest import Step
from benchmarks.gpu import cache_folders
from benchmarks.gpu_profile import device_times as kernels_of
from benchmarks.gpu_worker import device_times, host_times
from benchmarks.report import OURS, PEER
from benchmarks.turns import TURN, working
from benchmarks.wide import selected
from benchmarks.wide_models import row_names
from tests.harness.pool import RETIRE, Result, Task, run_tasks, serve

STEPS = 3
ROWS = 12  # kernels that are shown


def handle(task: Task) -> Result:
    with working() as turn:
        from benchmarks.wide_measure import Contest, placed, use_packages, why
        from benchmarks.wide_models import subject_of

        try:
            use_packages()
            subject = placed(subject_of(task["row"], "cuda"), "cuda", task["row"])
            contest = Contest(subject, {**task, "clock": "wall"})
            _, first_s = contest.first_calls()
            steps = {name: contest.step(name) for name in first_s}
            with turn.alone():
                found = {
                    **device_times(steps, "cuda", task["budget_s"]),
                    "host_us": host_times(steps, "cuda", 0.5),
                    "kernels": {name: longest(step) for name, step in steps.items()},
                }
            result = {"status": "pass", "first_s": first_s, "failures": contest.failures, **found}
        except Exception as error:
            result = {"status": "error", "message": why(error)}
    return result | {RETIRE: True}


def longest(step: Step) -> dict[str, Any]:
    """Kernels of one call: how many, their microseconds together, and those that take longest."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as watched:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    found = kernels_of(watched.events())
    ordered = sorted(found.items(), key=lambda row: -row[1][0])[:ROWS]
    return {
        "count": sum(count for _, count in found.values()) / STEPS,
        "us": sum(time for time, _ in found.values()) / STEPS,
        "longest": [(name[:100], time / STEPS, count / STEPS) for name, (time, count) in ordered],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", required=True, help="regular expression on names of rows")
    parser.add_argument("--backends", nargs="+", default=[PEER, OURS])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [row for row in selected(row_names(), "", "1/1") if re.search(arguments.only, row)]
    document: dict[str, Result] = {}

    def record(task: Task, result: Result) -> None:
        document[task["row"]] = result
        arguments.results.mkdir(parents=True, exist_ok=True)
        (arguments.results / "profile.json").write_text(json.dumps(document, indent=1) + "\n")
        print("\n".join(lines(task["row"], result)), flush=True)

    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        environment = cache_folders(cache) | {TURN: os.path.join(cache, "turn")}
        common = {"backends": ["eager", *arguments.backends], "device": "cuda"}
        common["budget_s"] = arguments.budget
        run_tasks(
            "benchmarks.wide_profile",
            [{"row": row, **common} for row in rows],
            jobs=arguments.jobs,
            timeout_s=arguments.seconds,
            on_result=record,
            env=environment,
            time_limit_s=arguments.seconds,
        )


def lines(row: str, result: Result) -> list[str]:
    if result["status"] != "pass":
        return [f"{row} {result['status']} {result.get('message', '')}"]
    found = [row]
    for name, kernels in result["kernels"].items():
        times = [result[k][name]["median"] for k in ("ms", "device_ms")]
        host = result["host_us"][name]["median"]
        found.append(
            f"  {name:<9} {times[0]:8.3f} ms, device {times[1]:8.3f} ms, host {host:6.0f} us, "
            f"{kernels['count']:.0f} kernels {kernels['us']:.0f} us"
        )
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        serve(handle)
