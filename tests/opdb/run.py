"""The whole operator database by hand, in processes that may crash.

python -m tests.opdb.run --backend perfuse --dtypes float32 --jobs 2
python -m tests.opdb.run --operands offset --dtypes float32
python -m tests.opdb.run --device cuda --jobs 8 --time-limit 420 --against opdb-inductor-cuda.json

On a machine without network the database's one missing package is carried along in a folder that
git ignores: `pip install --target .device_deps expecttest`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.harness.backend import worker_environment
from tests.harness.pool import Result, Task, run_tasks
from tests.opdb.gaps import known_gaps
from tests.opdb.operands import OPERANDS
from tests.opdb.rows import DTYPES, GPU_DTYPES, MODES, Row, rows

SAMPLES = {"float32": 16}  # the other dtypes take OTHER_SAMPLES
OTHER_SAMPLES = 4
# On a GPU every sample is a kernel to compile, and device time is limited.
GPU_SAMPLES = 3
# Of one task: a row of a thousand samples is several, each with the whole time of a task.
MOST_SAMPLES = 64
STATUSES = ("pass", "gap", "wrong", "error", "crash", "timeout", "harness", "capture", "skip")
STATUSES += ("not run",)
NOT_RUN = {"status": "not run", "message": ""}
FAILURES = ("wrong", "error", "crash", "timeout", "harness")
PEER_FILE = Path(__file__).with_name("peer_results.json")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="perfuse")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), help="all that are asked for")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--operands", default="dense", choices=OPERANDS, help="where they are")
    parser.add_argument("--only", default="", help="regular expression on `op-dtype-mode`")
    parser.add_argument("--samples", type=int, help="samples a row, 0 for all of them")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--timeout", type=float, default=120.0, help=f"seconds for {MOST_SAMPLES} samples"
    )
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--against", type=Path, help="results of another backend to compare with")
    parser.add_argument("--json", type=Path, help="where the results go; old rows are kept")
    parser.add_argument("--resume", action="store_true", help="leave out rows already in --json")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    path = arguments.json or default_path(arguments.backend, arguments.device)
    results = load(path) if arguments.resume or arguments.device == "cpu" else {}
    wanted = wanted_rows(arguments)
    if arguments.resume:
        wanted = [r for r in wanted if str(r) not in results]
    run_rows(wanted, arguments, results, path)
    selected = {str(r): results.get(str(r), NOT_RUN) for r in wanted}
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table(selected, arguments.backend))
    for line in failures(selected):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if arguments.against:
        console.print(comparison(selected, load(arguments.against)), markup=False)
    return int(any(r["status"] in FAILURES for r in selected.values()))


def wanted_rows(arguments: argparse.Namespace) -> list[Row]:
    """Under a time limit shuffled, always in the same way: it cuts off no whole family."""
    dtypes = arguments.dtypes or (GPU_DTYPES if arguments.device == "cuda" else list(DTYPES))
    every = rows(dtypes, arguments.modes, arguments.device)
    every = (replace(r, operands=arguments.operands) for r in every)
    found = [r for r in every if re.search(arguments.only, str(r))]
    if arguments.time_limit == float("inf"):
        return found
    return sorted(found, key=lambda r: zlib.crc32(str(r).encode()))


def failures(results: dict[str, Any]) -> list[str]:
    """A line a failure; the same message of several rows is said once."""
    by_message: dict[tuple[str, str], list[str]] = {}
    for name, result in sorted(results.items()):
        if result["status"] in FAILURES:
            message = re.sub(r"sample \d+ args=.*? kwargs=\{.*?\}: ", "", result["message"])
            by_message.setdefault((result["status"], message), []).append(name)
    grouped = sorted(by_message.items(), key=lambda item: -len(item[1]))
    return [
        f"{status} {len(names)}x {' '.join(names[:4])}: {message[:240]}"
        for (status, message), names in grouped
    ]


def comparison(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Operators that pass in every row both sides ran, and what only the other side passes."""
    common = [n for n in mine if n in theirs and mine[n]["status"] != NOT_RUN["status"]]
    operators = {n.rsplit("-", 2)[0] for n in common}

    def num_passing(results: dict[str, Any]) -> int:
        bad = {n.rsplit("-", 2)[0] for n in common if results[n]["status"] in FAILURES}
        return len(operators - bad)

    lost = [n for n in common if mine[n]["status"] in FAILURES and theirs[n]["status"] == "pass"]
    return (
        f"operators passing, of {len(operators)} run by both: {num_passing(mine)}, "
        f"the other {num_passing(theirs)}; rows only the other passes: {len(lost)} "
        + " ".join(sorted(lost))[:1500]
    )


def default_path(backend: str, device: str) -> Path:
    if backend == "inductor" and device == "cpu":
        return PEER_FILE
    return Path(f"opdb-{backend}-{device}.json")


def run_rows(
    wanted: Iterable[Row], arguments: argparse.Namespace, results: dict[str, Any], path: Path
) -> None:
    tasks = [task_of(row, arguments) for row in wanted]
    gaps = {str(row) for row in known_gaps()} if arguments.backend == "perfuse" else set()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), disable=arguments.quiet) as progress:
        bar = progress.add_task(arguments.backend, total=len(tasks))

        def record(task: Task, result: Result) -> Task | None:
            name = str(Row(task["op"], task["dtype"], task["mode"], task["operands"]))
            further, result = joined(task, result)
            if further is not None:
                return further
            if name in gaps and result["status"] in FAILURES:
                result["status"] = "gap"
            results[name] = result
            progress.advance(bar)
            if len(results) % 25 == 0:
                save(path, results, arguments.backend)
            return None

        run_tasks(
            "tests.opdb.worker",
            tasks,
            jobs=arguments.jobs,
            timeout_s=arguments.timeout,
            on_result=record,
            env=worker_environment(arguments.backend),
            time_limit_s=arguments.time_limit,
        )
    save(path, results, arguments.backend)


def joined(task: Task, result: Result) -> tuple[Task | None, Result]:
    """The task for the samples that are left, unless the row has failed; its result so far."""
    earlier = task.get("earlier", {"status": "skip", "message": "", "seconds": 0.0})
    num_left = result.pop("num_left", 0)
    if result["status"] == "skip":  # no sample of this part runs in eager: the others count
        result = result | {"status": earlier["status"]}
    result = result | {"seconds": round(earlier["seconds"] + result["seconds"], 3)}
    if num_left and result["status"] in ("pass", "skip"):
        return task | {"first": task["first"] + task["most"], "earlier": result}, result
    return None, result


def task_of(row: Row, arguments: argparse.Namespace) -> Task:
    samples = arguments.samples
    if samples is None and arguments.device == "cuda":
        samples = GPU_SAMPLES
    elif samples is None:
        samples = SAMPLES.get(row.dtype, OTHER_SAMPLES)
    return {
        "op": row.op,
        "dtype": row.dtype,
        "mode": row.mode,
        "operands": row.operands,
        "backend": arguments.backend,
        "device": arguments.device,
        "samples": min(samples, 4) if row.mode == "backward" and samples else samples,
        "first": 0,
        "most": MOST_SAMPLES,
    }


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
