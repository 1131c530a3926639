"""The whole operator database by hand, in processes that may crash.

python -m tests.opdb.run --backend perfuse --dtypes float32 --jobs 2
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.harness.pool import Result, Task, run_tasks
from tests.opdb.gaps import known_gaps
from tests.opdb.rows import DTYPES, MODES, Row, rows

SAMPLES = {"float32": 16}  # the other dtypes take OTHER_SAMPLES
OTHER_SAMPLES = 4
STATUSES = ("pass", "gap", "wrong", "error", "crash", "timeout", "harness", "capture", "skip")
FAILURES = ("wrong", "error", "crash", "timeout", "harness")
PEER_FILE = Path(__file__).with_name("peer_results.json")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="perfuse")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--only", default="", help="regular expression on `op-dtype-mode`")
    parser.add_argument("--samples", type=int, help="samples a row, 0 for all of them")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a row")
    parser.add_argument("--json", type=Path, help="where the results go; old rows are kept")
    parser.add_argument("--resume", action="store_true", help="leave out rows already in --json")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    path = arguments.json or default_path(arguments.backend)
    results = load(path)
    wanted = [
        r for r in rows(arguments.dtypes, arguments.modes) if re.search(arguments.only, str(r))
    ]
    if arguments.resume:
        wanted = [r for r in wanted if str(r) not in results]
    run_rows(wanted, arguments, results, path)
    selected = {str(r): results[str(r)] for r in wanted}
    console = Console()
    console.print(table(selected, arguments.backend))
    for name, result in sorted(selected.items()):
        if result["status"] in FAILURES:
            console.print(f"[red]{result['status']}[/] {name}: {result['message']}", markup=True)
    return int(any(r["status"] in FAILURES for r in selected.values()))


def default_path(backend: str) -> Path:
    return PEER_FILE if backend == "inductor" else Path(f"opdb-{backend}.json")


def run_rows(
    wanted: Iterable[Row], arguments: argparse.Namespace, results: dict[str, Any], path: Path
) -> None:
    tasks = [task_of(row, arguments) for row in wanted]
    gaps = {str(row) for row in known_gaps()} if arguments.backend == "perfuse" else set()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), disable=arguments.quiet) as progress:
        bar = progress.add_task(arguments.backend, total=len(tasks))

        def record(task: Task, result: Result) -> None:
            name = str(Row(task["op"], task["dtype"], task["mode"]))
            if name in gaps and result["status"] in FAILURES:
                result["status"] = "gap"
            results[name] = result
            progress.advance(bar)
            if len(results) % 25 == 0:
                save(path, results, arguments.backend)

        run_tasks(
            "tests.opdb.worker",
            tasks,
            jobs=arguments.jobs,
            timeout_s=arguments.timeout,
            on_result=record,
            env=worker_environment(arguments.backend),
        )
    save(path, results, arguments.backend)


def task_of(row: Row, arguments: argparse.Namespace) -> Task:
    samples = arguments.samples
    if samples is None:
        samples = SAMPLES.get(row.dtype, OTHER_SAMPLES)
    return {
        "op": row.op,
        "dtype": row.dtype,
        "mode": row.mode,
        "backend": arguments.backend,
        "samples": min(samples, 4) if row.mode == "backward" and samples else samples,
    }


def worker_environment(backend: str) -> dict[str, str]:
    """The peer starts a pool of compiler processes in each worker unless told not to."""
    own = {"PERFUSE_VERIFY": "1"} if backend == "perfuse" else {}
    peer = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if backend == "inductor" else {}
    return {"OMP_NUM_THREADS": "1", **own, **peer}


def load(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())["rows"]) if path.exists() else {}


def save(path: Path, results: dict[str, Any], backend: str) -> None:
    document = {
        "backend": backend,
        "torch": torch.__version__,
        "rows": dict(sorted(results.items())),
    }
    path.write_text(json.dumps(document, indent=0) + "\n")


def table(results: dict[str, Any], backend: str) -> Table:
    view = Table(title=f"operator database, backend {backend}")
    view.add_column("dtype and mode")
    for status in STATUSES:
        view.add_column(status, justify="right")
    groups: dict[str, Counter[str]] = {}
    for name, result in results.items():
        group = " ".join(name.rsplit("-", 2)[1:])
        groups.setdefault(group, Counter())[result["status"]] += 1
    for group, counts in sorted(groups.items()):
        view.add_row(group, *(str(counts[s] or "") for s in STATUSES))
    return view


if __name__ == "__main__":
    raise SystemExit(main())
