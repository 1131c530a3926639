"""Many random programs by hand; a failure prints its seed and a program that runs alone.

python -m tests.random_programs.run --count 2000 --seed 0 --backend perfuse --jobs 2
python -m tests.random_programs.run --seed-only 1234
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.syntax import Syntax

from tests.harness.backend import default_backend
from tests.harness.pool import Result, Task, run_tasks
from tests.random_programs.generate import from_seed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seed-only", type=int, help="this one seed, with its whole program")
    parser.add_argument("--backend", default=default_backend())
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a program")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 150)
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    if arguments.seed_only is not None:
        seeds = range(arguments.seed_only, arguments.seed_only + 1)
        console.print(Syntax(from_seed(arguments.seed_only).standalone(), "python"))
    results = run_seeds(seeds, arguments, console)
    counts = Counter(r["status"] for r in results.values())
    console.print(f"{len(results)} programs: " + ", ".join(f"{n} {s}" for s, n in counts.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(s not in ("pass", "skip") for s in counts))


def run_seeds(
    seeds: range, arguments: argparse.Namespace, console: Console
) -> dict[int, dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}
    common = {"backend": arguments.backend, "device": arguments.device}
    tasks = [{"seed": s, "shrink": not arguments.no_shrink, **common} for s in seeds]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=arguments.quiet
    ) as progress:
        bar = progress.add_task(arguments.backend, total=len(tasks))

        def record(task: Task, result: Result) -> None:
            results[task["seed"]] = result
            progress.advance(bar)
            if result["status"] not in ("pass", "skip"):
                (report_briefly if arguments.quiet else report)(console, task["seed"], result)

        run_tasks(
            "tests.random_programs.worker",
            tasks,
            jobs=arguments.jobs,
            timeout_s=arguments.timeout,
            on_result=record,
            time_limit_s=arguments.time_limit,
        )
    return results


def report(console: Console, seed: int, result: Result) -> None:
    console.print(f"[red]{result['status']}[/] seed {seed}")
    console.print(result["message"], markup=False)
    # A crash leaves no shrunk program behind; the seed gives the whole one.
    console.print(Syntax(result.get("source") or from_seed(seed).standalone(), "python"))


def report_briefly(console: Console, seed: int, result: Result) -> None:
    """Two lines: the message, and the statements of the program."""
    source = result.get("source") or from_seed(seed).standalone()
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
