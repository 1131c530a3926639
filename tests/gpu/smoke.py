"""All programs of `tests.gpu.programs` in a minute or two, failures said as they happen.

python -m tests.gpu.smoke --device cuda --jobs 8 --time-limit 120 --json smoke.json
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path

from tests.gpu.programs import LARGE, SMALL
from tests.harness.backend import default_backend, worker_environment
from tests.harness.devices import gpu_device
from tests.harness.pool import Result, Task, run_tasks

TIMEOUT_S = 90.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=gpu_device())
    parser.add_argument("--backend", default=default_backend())
    parser.add_argument("--only", default="", help="regular expression on the names of programs")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--json", type=Path, help="where the results go")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    programs = SMALL if arguments.device == "cpu" else (*SMALL, *LARGE)
    names = [p.name for p in programs if re.search(arguments.only, p.name)]
    common = {"backend": arguments.backend, "device": arguments.device}
    results: dict[str, Result] = {}

    def record(task: Task, result: Result) -> None:
        results[task["program"]] = result
        if result["status"] != "pass":
            said = f"{result['status']} {task['program']}: {result['message'][:420]}"
            print(said, flush=True)

    run_tasks(
        "tests.gpu.worker",
        [{"program": name, **common} for name in names],
        jobs=arguments.jobs,
        timeout_s=TIMEOUT_S,
        on_result=record,
        env=worker_environment(arguments.backend),
        time_limit_s=arguments.time_limit,
    )
    counts = Counter(r["status"] for r in results.values())
    counts["not reached"] = len(names) - len(results)
    slowest = sorted(results, key=lambda n: -results[n]["seconds"])[:3]
    shown = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
    print(f"{len(names)} programs: {shown}; slowest {', '.join(slowest)}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(counts["pass"] < len(names))


if __name__ == "__main__":
    raise SystemExit(main())
