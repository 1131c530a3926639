"""Many random programs by hand; a failure prints its seed and a program that runs alone.

python -m tests.random_programs.run --count 2000 --seed 0 --backend perfuse --jobs 2
python -m tests.random_programs.run --kind training --count 5000 --jobs 16 --results runs.json
python -m tests.random_programs.run --kind training --seed-only 1234
python -m tests.random_programs.run --settings drawn --count 500

With `--results`, seeds already in the file are left out: a run goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.syntax import Syntax

from tests.harness.backend import default_backend, worker_environment
from tests.harness.pool import Result, Task, run_tasks
from tests.random_programs.kinds import KINDS, MODES, program_of
from tests.random_programs.settings import SETTINGS

SAVE_EVERY_S = 5.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="plain", choices=tuple(KINDS))
    parser.add_argument("--mode", default="drawn", choices=MODES, help="static, dynamic or drawn")
    parser.add_argument("--settings", default="default", choices=SETTINGS, help="by seed if drawn")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seed-only", type=int, help="this one seed, with its whole program")
    parser.add_argument("--backend", default=default_backend())
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a program")
    parser.add_argument("--json", type=Path, help="where the results of this run go")
    parser.add_argument(
        "--results", type=Path, help="results of all runs; seeds in it are left out"
    )
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 150)
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    if arguments.seed_only is not None:
        seeds = range(arguments.seed_only, arguments.seed_only + 1)
        console.print(Syntax(source_of(arguments.seed_only, arguments), "python"))
    results = run_seeds(seeds, arguments, console)
    counts = Counter(r["status"] for r in results.values())
    console.print(f"{len(results)} programs: " + ", ".join(f"{n} {s}" for s, n in counts.items()))
    reasons = Counter(r["message"] for r in results.values() if r["status"] == "skip")
    for reason, count in reasons.most_common():
        console.print(f"  skip {count}: {reason}", markup=False, highlight=False)
    if arguments.json:
        save(arguments.json, results)
    return int(any(s not in ("pass", "skip") for s in counts))


def key_of(seed: int, arguments: argparse.Namespace) -> str:
    key = f"{arguments.kind} {arguments.mode} {seed}"
    return key if arguments.settings == "default" else f"{key} under {arguments.settings} settings"


def source_of(seed: int, arguments: argparse.Namespace) -> str:
    return program_of(arguments.kind, seed, arguments.mode).standalone()


def save(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Beside the file first: a run that is killed while writing leaves the old results."""
    aside = path.with_suffix(".writing")
    aside.write_text(json.dumps(results, indent=1) + "\n")
    aside.replace(path)


def run_seeds(
    seeds: range, arguments: argparse.Namespace, console: Console
) -> dict[str, dict[str, Any]]:
    path = arguments.results
    results: dict[str, dict[str, Any]] = (
        json.loads(path.read_text()) if path and path.exists() else {}
    )
    common = {n: getattr(arguments, n) for n in ("backend", "device", "kind", "mode", "settings")}
    common["shrink"] = not arguments.no_shrink
    left = [s for s in seeds if key_of(s, arguments) not in results]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=arguments.quiet
    ) as progress:
        bar = progress.add_task(f"{arguments.kind} {arguments.backend}", total=len(left))
        saved = [time.monotonic()]

        def record(task: Task, result: Result) -> None:
            results[key_of(task["seed"], arguments)] = result
            progress.advance(bar)
            if result["status"] not in ("pass", "skip"):
                show = report_briefly if arguments.quiet else report
                show(console, task["seed"], result, source_of(task["seed"], arguments))
            if path and time.monotonic() - saved[0] > SAVE_EVERY_S:
                save(path, results)
                saved[0] = time.monotonic()

        run_tasks(
            "tests.random_programs.worker",
            [{"seed": s, **common} for s in left],
            jobs=arguments.jobs,
            timeout_s=arguments.timeout,
            on_result=record,
            env=worker_environment(arguments.backend),
            time_limit_s=arguments.time_limit,
        )
    if path:
        save(path, results)
    return {k: results[k] for s in seeds if (k := key_of(s, arguments)) in results}


def report(console: Console, seed: int, result: Result, whole: str) -> None:
    console.print(f"[red]{result['status']}[/] seed {seed}")
    console.print(result["message"], markup=False)
    # A crash leaves no shrunk program behind: then the whole one is shown.
    console.print(Syntax(result.get("source") or whole, "python"))


def report_briefly(console: Console, seed: int, result: Result, whole: str) -> None:
    """Two lines: the message, and the statements of the program."""
    source = result.get("source") or whole
    body = source.partition("def program(")[2].partition("\n\n")[0]
    console.print(
        f"{result['status']} seed {seed}: {result['message'][:400]}\n"
        f"    {'; '.join(line.strip() for line in body.splitlines()[1:])[:700]}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
