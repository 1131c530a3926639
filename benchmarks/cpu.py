"""Eager, TorchInductor and Perfuse on the CPU: run time and compile time.

    python -m benchmarks.cpu                      everything (about two hours)
    python -m benchmarks.cpu --quick --kernels    kernels, short
    python -m benchmarks.cpu --only '^softmax'

Each case has a process of its own, so that caches and memory pools do not leak to the next one.
Results go to benchmarks/results/<date>-cpu-<host>/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # also when started as a script
    sys.path.insert(0, str(ROOT))

from benchmarks import machine, report, targets  # noqa: E402
from benchmarks.cases import Case  # noqa: E402
from benchmarks.catalogue import catalogue  # noqa: E402
from benchmarks.report import OURS, PEER, Row  # noqa: E402

BUDGET_S = {"kernel": 6.0, "model": 20.0, "overhead": 2.0}
QUICK_BUDGET_S = {"kernel": 1.0, "model": 3.0, "overhead": 0.5}
TIMEOUT_S = 600.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--compile-time", action="store_true")
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    parser.add_argument("--only", default="", help="regular expression on the names of cases")
    parser.add_argument("--backend", default=OURS, help="what stands in the Perfuse column")
    parser.add_argument("--repeats", type=int, default=3, help="processes a case")
    parser.add_argument("--results", type=Path, help="where the results go")
    arguments = parser.parse_args()
    if not (arguments.kernels or arguments.models or arguments.compile_time):
        arguments.kernels = arguments.models = arguments.compile_time = True
    return arguments


def main() -> None:
    arguments = parse_arguments()
    console = Console() if sys.stdout.isatty() else Console(width=110)
    document: Row = {"machine": machine.describe()}
    tables: list[Table] = []
    cases = [c for c in catalogue().values() if re.search(arguments.only, c.name)]
    if arguments.kernels:
        add_runs("kernels", "kernel", cases, arguments, document, tables, console)
        add_runs("overhead", "overhead", cases, arguments, document, tables, console)
    if arguments.models:
        add_runs("models", "model", cases, arguments, document, tables, console)
    if arguments.compile_time:
        add_compile_times(cases, arguments, document, tables, console)
    date = datetime.date.today().isoformat()
    default = ROOT / "benchmarks" / "results" / f"{date}-cpu-{document['machine']['host']}"
    folder = arguments.results or default
    report.save(folder, document, tables)
    console.print(f"results in {folder}")


def add_runs(
    name: str,
    kind: str,
    cases: list[Case],
    arguments: argparse.Namespace,
    document: Row,
    tables: list[Table],
    console: Console,
) -> None:
    chosen = [c for c in cases if c.kind == kind]
    if not chosen:
        return
    budget = (QUICK_BUDGET_S if arguments.quick else BUDGET_S)[kind]
    rows = []
    with progress_bar(console) as progress:
        bar = progress.add_task(name, total=len(chosen))
        for case in chosen:
            progress.update(bar, description=f"{name}: {case.name}")
            rows.append(run_case(case, budget, arguments))
            progress.advance(bar)
    document[name] = rows
    unit = "us" if kind == "overhead" else "ms"
    times = "process" if arguments.repeats == 1 else "processes"
    title = f"{name}: medians of rounds and of {arguments.repeats} {times}"
    tables.append(report.run_table(title, rows, unit))
    console.print(tables[-1])
    document[f"{name}_missed"] = missed = targets.missed(name, rows)
    console.print(f"{name}: missed {len(missed)} {'; '.join(missed)}", markup=False)


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)


def run_case(case: Case, budget: float, arguments: argparse.Namespace) -> Row:
    runs = [run_once(case, budget, arguments.backend) for _ in range(arguments.repeats)]
    return report.run_row(case.name, runs)


def run_once(case: Case, budget: float, backend: str) -> Row:
    command = ["benchmarks.interleaved", case.name, "--backends", "eager", PEER, backend]
    result = in_process([*command, "--budget", str(budget)], {})
    if "error" in result:
        failures = {OURS: result["error"]}
        return {"times_ms": {}, "failures": failures}
    if backend in result["times_ms"]:
        result["times_ms"][OURS] = result["times_ms"].pop(backend)
    return result


def add_compile_times(
    cases: list[Case],
    arguments: argparse.Namespace,
    document: Row,
    tables: list[Table],
    console: Console,
) -> None:
    chosen = [c for c in cases if c.kind == "model" or c.name in ("gelu_bias", "softmax")]
    rows = []
    with progress_bar(console) as progress:
        bar = progress.add_task("compile time", total=len(chosen))
        for case in chosen:
            progress.update(bar, description=f"compile time: {case.name}")
            rows.append(compile_time_row(case, arguments.backend))
            progress.advance(bar)
    if rows:
        document["compile_time"] = rows
        tables.append(report.compile_table(rows))
        console.print(tables[-1])


def compile_time_row(case: Case, backend: str) -> Row:
    """Cold with empty caches, then warm: another process on the caches the first one left."""
    row: Row = {"name": case.name}
    for who, name in (("peer", PEER), ("ours", backend)):
        with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
            folders = {"TORCHINDUCTOR_CACHE_DIR": cache, "PERFUSE_CACHE_DIR": cache}
            for heat in ("cold", "warm"):
                command = ["benchmarks.first_call", case.name, "--backend", name, "--cache", cache]
                result = in_process(command, folders)
                row[f"{heat}_{who}"] = result.get("seconds")
                row[f"{heat}_compiler_{who}"] = result.get("compiler_seconds")
                if heat == "cold":
                    row[f"kernels_{who}"] = result.get("kernels")
                if "error" in result:
                    row[f"{heat}_error_{who}"] = result["error"]
    return row


def in_process(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run a module and read the JSON of its last line."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {TIMEOUT_S:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": f"exit {done.returncode}: {done.stderr.strip()[-400:]}"}
    return dict(json.loads(lines[-1]))


if __name__ == "__main__":
    main()
