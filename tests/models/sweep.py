"""Every architecture of `transformers` that can be made small, its forward against eager.

python -m tests.models.sweep --jobs 1 --time-limit 2000 --json sweep.json
python -m tests.models.sweep --only '^(bert|gpt2)$'

Rows already in the file are kept and left out, so that a run goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.harness.backend import worker_environment
from tests.harness.pool import Result, Task, run_tasks
from tests.models.tiny import model_types

PEER = "inductor"  # where something fails, the worker asks it too
Results = dict[str, dict[str, Any]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="perfuse")
    parser.add_argument("--only", default="", help="regular expression on the types of models")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a type")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--json", type=Path, help="where the results go; rows in it are left out")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    path = arguments.json
    known: Results = json.loads(path.read_text())["rows"] if path and path.exists() else {}
    wanted = [t for t in model_types() if re.search(arguments.only, t)]
    # Always in the same order, which no family has a place in: a time limit cuts off none of them.
    wanted.sort(key=lambda t: zlib.crc32(t.encode()))
    run_types([t for t in wanted if t not in known], arguments, known)
    console = Console(width=None if sys.stdout.isatty() else 150)
    selected = {t: known[t] for t in wanted if t in known}
    for line in (*failures(selected), summary(selected, len(wanted))):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return int(any(is_ours(r) for r in selected.values()))


def run_types(types: list[str], arguments: argparse.Namespace, results: Results) -> None:
    tasks = [{"model_type": t, "backend": arguments.backend} for t in types]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), disable=arguments.quiet) as progress:
        bar = progress.add_task(arguments.backend, total=len(tasks))

        def record(task: Task, result: Result) -> None:
            results[task["model_type"]] = result
            progress.advance(bar)
            if arguments.json:
                save(arguments.json, arguments.backend, results)

        run_tasks(
            "tests.models.sweep_worker",
            tasks,
            jobs=arguments.jobs,
            timeout_s=arguments.timeout,
            on_result=record,
            env=worker_environment(PEER) | worker_environment(arguments.backend),
            time_limit_s=arguments.time_limit,
        )


def save(path: Path, backend: str, results: Results) -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    document = {"backend": backend, **versions, "rows": dict(sorted(results.items()))}
    path.write_text(json.dumps(document, indent=0) + "\n")


def is_failure(result: Result) -> bool:
    return result["status"] not in ("pass", "skip")


def is_ours(result: Result) -> bool:
    """A worker that died or went silent could not say whose fault it was: ours until shown."""
    return is_failure(result) and result.get("whose") != "capture"


def failures(results: Results) -> list[str]:
    return [
        f"{result['status']} {name} ({result.get('whose', 'ours')}; {result.get('others', '')}): "
        f"{result['message'][:300]}"
        for name, result in results.items()
        if is_failure(result)
    ]


def summary(results: Results, num_wanted: int) -> str:
    counts = Counter(r["status"] for r in results.values())
    num_ours = sum(is_ours(r) for r in results.values())
    num_captures = sum(is_failure(r) for r in results.values()) - num_ours
    num_broken = sum(r.get("num_graphs", 1) > 1 for r in results.values())
    statuses = ", ".join(f"{n} {s}" for s, n in counts.most_common())
    return (
        f"{len(results)} of {num_wanted} types: {statuses}; "
        f"ours {num_ours}, PyTorch's own capture {num_captures}; "
        f"{num_broken} in more than one graph, which Dynamo alone makes too"
    )


if __name__ == "__main__":
    raise SystemExit(main())
