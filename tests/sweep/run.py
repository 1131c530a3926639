"""Software that others wrote, compiled, against eager.

python -m tests.sweep.run --jobs 2 --results sweep.json
python -m tests.sweep.run --family timm torchvision --only 'resnet.*/train'
python -m tests.sweep.run --sample

Families: PyTorch's own databases of modules and optimisers, idioms of training code, practices
around a model, values that eager refuses, timm, torchvision, diffusers, transformers,
x-transformers and vit-pytorch. Nothing is downloaded: weights are random. A family that is not
installed is skipped. Rows already in the results are left out, so that a run goes on where the last
one stopped. Where there is no network, packages in the folder `.sweep_deps` are used.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.harness.backend import worker_environment
from tests.harness.pool import Result, Task, run_tasks
from tests.sweep.families import FAMILIES
from tests.sweep.judge import PEER
from tests.sweep.packages import use_packages
from tests.sweep.sample import SAMPLE

Results = dict[str, dict[str, Any]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="perfuse")
    parser.add_argument("--family", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--only", default="", help="regular expression on family/name/variant")
    parser.add_argument("--sample", action="store_true", help="the rows that CI runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a row")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--results", type=Path, help="where results go; rows in it are left out")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def main() -> int:
    use_packages()
    arguments = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 150)
    path = arguments.results
    known: Results = json.loads(path.read_text())["rows"] if path and path.exists() else {}
    wanted, missing = rows_of(arguments.family)
    wanted = [r for r in wanted if re.search(arguments.only, r)]
    if arguments.sample:
        wanted = [r for r in wanted if r in SAMPLE]
    run_rows([r for r in wanted if r not in known], arguments, known, console)
    selected = {r: known[r] for r in wanted if r in known}
    for line in (*failures(selected), *missing):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(table_of(selected, wanted))
    for line in skips(selected):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return int(any(is_ours(r) for r in selected.values()))


def rows_of(families: list[str]) -> tuple[list[str], list[str]]:
    """Every row of the families that are here, and why the others are not."""
    rows, missing = [], []
    for family in families:
        try:
            rows += FAMILIES[family].rows(family)
        except (ImportError, RuntimeError) as error:
            missing.append(f"skip {family}: {type(error).__name__}: {error}")
    # Always in the same order, which no family has a place in: a time limit cuts off none of them.
    # The variants of a model follow each other: a worker imports and searches for it once.
    return sorted(rows, key=lambda r: (zlib.crc32(r.rpartition("/")[0].encode()), r)), missing


def run_rows(
    rows: list[str], arguments: argparse.Namespace, results: Results, console: Console
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=arguments.quiet
    ) as progress:
        bar = progress.add_task(arguments.backend, total=len(rows))

        def record(task: Task, result: Result) -> None:
            if is_cut_off(result, arguments.timeout):
                return
            results[task["row"]] = result
            progress.advance(bar)
            if is_failure(result):
                console.print(failure(task["row"], result), markup=False, soft_wrap=True)
            if arguments.results:
                save(arguments.results, arguments.backend, results)

        run_tasks(
            "tests.sweep.worker",
            [{"row": r, "backend": arguments.backend} for r in rows],
            jobs=arguments.jobs,
            timeout_s=arguments.timeout,
            on_result=record,
            env=worker_environment(PEER) | worker_environment(arguments.backend),
            time_limit_s=arguments.limit_s,
        )


def is_cut_off(result: Result, timeout_s: float) -> bool:
    """Whether the time of the whole run ended during the row: the next run does it."""
    return bool(result["status"] == "timeout" and result["seconds"] < timeout_s)


def save(path: Path, backend: str, results: Results) -> None:
    """Beside the file first: a run that is killed while writing leaves the old results."""
    document = {
        "backend": backend,
        "torch": torch.__version__,
        "rows": dict(sorted(results.items())),
    }
    aside = path.with_suffix(".writing")
    aside.write_text(json.dumps(document, indent=0) + "\n")
    aside.replace(path)


def is_failure(result: Result) -> bool:
    return result["status"] not in ("pass", "skip")


def is_ours(result: Result) -> bool:
    """A worker that died or went silent could not say whose fault it was: ours until shown."""
    return is_failure(result) and result.get("whose") != "capture"


def failure(row: str, result: Result) -> str:
    whose, others = result.get("whose", "ours"), result.get("others", "")
    return f"{result['status']} {row} ({whose}; {others}): {result['message'][:300]}"


def failures(results: Results) -> list[str]:
    return [failure(row, result) for row, result in results.items() if is_failure(result)]


def skips(results: Results) -> list[str]:
    """Every reason for which rows are skipped, and how many models it concerns."""
    names: dict[str, set[str]] = {}
    for row, result in results.items():
        if result["status"] == "skip":
            names.setdefault(result["message"], set()).add(row.rpartition("/")[0])
    return [
        f"skip {len(found)}: {reason}: {', '.join(sorted(found))}"
        for reason, found in sorted(names.items(), key=lambda item: -len(item[1]))
    ]


def table_of(results: Results, wanted: list[str]) -> Table:
    """A line a family: how many rows, how each came out, whose the failures are."""
    columns = ("pass", "skip", "wrong", "error", "crash", "timeout", "harness", "ours", "capture's")
    table = Table("family", "rows", "run", *columns)
    for family in (*FAMILIES, "all"):
        rows = [r for r in wanted if family in ("all", r.split("/")[0])]
        found = [results[r] for r in rows if r in results]
        counts = Counter(r["status"] for r in found)
        counts["ours"] = sum(is_ours(r) for r in found)
        counts["capture's"] = sum(is_failure(r) for r in found) - counts["ours"]
        if rows:
            numbers = (len(rows), len(found), *(counts[c] for c in columns))
            table.add_row(family, *map(str, numbers))
    return table


if __name__ == "__main__":
    raise SystemExit(main())
