"""Eager, TorchInductor and Perfuse on many architectures: time, peak memory, first call.

    python -m benchmarks.wide                                     everything, on the CPU
    python -m benchmarks.wide --device cuda --seconds 590         a piece; run it again for the next
    python -m benchmarks.wide --only '/small/forward' --part 2/5  a fifth of some
    python -m benchmarks.wide --show                              what is known so far

Models of timm, transformers and diffusers with random weights, float32 on the CPU and bfloat16 on a
GPU, each row in a process of its own, contestants in turns. Rows that are in the results are left
out, failed ones too (`--retry` runs those again). Results go to
benchmarks/results/<date>-<device>-wide/: rows as JSON and CSV, a table with the worst first, and a
picture. First calls start with empty caches, and share the machine with `--jobs` others.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # also when started as a script
    sys.path.insert(0, str(ROOT))

from benchmarks import machine, wide_report  # noqa: E402
from benchmarks.gpu import cache_folders  # noqa: E402
from benchmarks.report import OURS, PEER, write_csv  # noqa: E402
from benchmarks.turns import TURN  # noqa: E402
from benchmarks.wide_models import row_names  # noqa: E402
from tests.harness.pool import Result, Task, run_tasks  # noqa: E402
from tests.sweep.packages import use_packages  # noqa: E402

# Ratios of different machines or versions do not belong into one table.
IDENTITY = (
    "cpu",
    "cores",
    "threads",
    "gpu",
    "torch",
    "triton",
    "transformers",
    "timm",
    "diffusers",
)
Document = dict[str, Any]


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="regular expression on library/name/size/task")
    parser.add_argument("--part", default="1/1", help="k/n: the k-th of n parts of the rows")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="in all")
    parser.add_argument("--timeout", type=float, default=480.0, help="seconds a row")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds of measuring a row")
    parser.add_argument("--threads", type=int, help="of the CPU; all of them unless given")
    parser.add_argument(
        "--shared",
        action="store_true",
        help="a machine that others use too: processor time of one thread in place of wall time",
    )
    parser.add_argument("--jobs", type=int, default=1, help="rows that compile at a time")
    parser.add_argument("--peer", default=PEER, help="the peer; empty: none")
    parser.add_argument("--retry", action="store_true", help="measure failed rows again")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--results", type=Path, help="folder of the results")
    arguments = parser.parse_args(given)
    if arguments.shared:
        arguments.threads = 1
    return arguments


def main(given: list[str] | None = None) -> int:
    use_packages()
    arguments = parse_arguments(given)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    console = Console() if sys.stdout.isatty() else Console(width=150)
    folder = arguments.results or default_folder(arguments.device)
    clock = "processor" if arguments.shared else "wall"
    document = load(folder, arguments.device, clock)
    chosen = selected(row_names(), arguments.only, arguments.part)
    if not arguments.show:
        run_rows(waiting(chosen, document["rows"], arguments.retry), arguments, document, folder)
    rows = wide_report.worst_first(
        {r: document["rows"][r] for r in chosen if r in document["rows"]}
    )
    lines = wide_report.summary(rows, arguments.device)
    show(console, document, rows, lines)
    console.print(f"{len(chosen) - len(rows)} rows of {len(chosen)} are left; results in {folder}")
    is_missed = any(not t.is_met for t in wide_report.targets(rows, arguments.device))
    return int(arguments.check and is_missed)


def default_folder(device: str) -> Path:
    return ROOT / "benchmarks" / "results" / f"{datetime.date.today().isoformat()}-{device}-wide"


# -- rows ----------------------------------------------------------------------------------------


def selected(rows: list[str], only: str, part: str) -> list[str]:
    """The rows whose names match, and of those every n-th."""
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise SystemExit(f"--part is k/n with 1 <= k <= n, got {part}")
    return [row for row in rows if re.search(only, row)][int(found[1]) - 1 :: int(found[2])]


def waiting(rows: list[str], known: dict[str, Any], retry: bool) -> list[str]:
    """The rows that are to be measured."""
    done = {r for r, found in known.items() if not retry or found["status"] in ("pass", "skip")}
    return [row for row in rows if row not in done]


def run_rows(
    rows: list[str], arguments: argparse.Namespace, document: Document, folder: Path
) -> None:
    backends = ["eager", *filter(None, [arguments.peer]), OURS]
    common = {"backends": backends, "device": arguments.device, "budget_s": arguments.budget}
    common["clock"] = document["clock"]
    commit = document["machine"]["commit"]

    def record(task: Task, result: Result) -> None:
        if result["status"] == "timeout" and result["seconds"] < arguments.timeout:
            return  # the time of the whole run ended: the next one does it
        document["rows"][task["row"]] = result | {"commit": commit}
        save(folder, document)
        print(line(task["row"], result), flush=True)

    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        environment = cache_folders(cache)
        if arguments.threads:
            environment["OMP_NUM_THREADS"] = str(arguments.threads)
        if arguments.jobs > 1 and TURN not in os.environ:
            environment[TURN] = os.path.join(cache, "turn")
        run_tasks(
            "benchmarks.wide_worker",
            [{"row": row, **common} for row in rows],
            jobs=arguments.jobs,
            timeout_s=arguments.timeout,
            on_result=record,
            env=environment,
            time_limit_s=arguments.seconds,
        )


def line(row: str, result: Result) -> str:
    found = wide_report.figures(row, result)
    ratios = [f"{found[k]:.2f}x {k.split('_')[1]}" for k in ("over_peer", "over_eager") if found[k]]
    text = f"{row:<60} {result['status']:<8} {' '.join(ratios)} {result.get('seconds', 0):.0f} s"
    return text if result["status"] == "pass" else f"{text} {result['message'][:200]}"


# -- results -------------------------------------------------------------------------------------


def load(folder: Path, device: str, clock: str) -> Document:
    """The folder's document, or a new one; whose machine is this one."""
    path, here = folder / "results.json", machine.describe()
    if not path.exists():
        return {"machine": here, "device": device, "clock": clock, "rows": {}}
    document: Document = json.loads(path.read_text())
    there = document["machine"]
    other = [k for k in IDENTITY if there.get(k) != here[k]]
    if other:
        differences = ", ".join(f"{k} {there.get(k)} (here {here[k]})" for k in other)
        raise SystemExit(f"{folder} has results of another machine: {differences}; see --results")
    if (document["device"], document["clock"]) != (device, clock):
        what = f"{document['device']} by {document['clock']} time"
        raise SystemExit(f"{folder} has results of {what}: see --results")
    return document | {"machine": here}


def save(folder: Path, document: Document) -> None:
    """Rows, table and picture; beside the file first, so that a killed run leaves the old rows."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    aside = path.with_suffix(".writing")
    ordered = document | {"rows": dict(sorted(document["rows"].items()))}
    aside.write_text(json.dumps(ordered, indent=1) + "\n")
    aside.replace(path)
    rows = wide_report.worst_first(document["rows"])
    write_csv(folder / "rows.csv", rows)
    with (folder / "table.txt").open("w") as file:
        lines = wide_report.summary(rows, document["device"])
        show(Console(file=file, width=150), document, rows, lines)
    about = document["machine"]
    where = about["gpu"] if document["device"] == "cuda" else f"{about['cores']} x {about['cpu']}"
    how = f"{about['threads']} threads, {document['clock']} time"
    title = f"{len(rows)} rows, {where}, {how}, torch {about['torch']}"
    wide_report.draw(folder / "ratios.svg", rows, title)


def show(console: Console, document: Document, rows: list[Any], lines: list[str]) -> None:
    about = "\n".join(f"{k}: {v}" for k, v in document["machine"].items())
    console.print(about, markup=False, highlight=False)
    if rows:
        console.print(
            wide_report.table_of(
                rows, f"{document['device']}, {document['clock']} time: worst first"
            )
        )
    for text in lines:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
