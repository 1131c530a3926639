"""The corpus with every compiler here, at every optimisation level and vector ISA.

python -m tests.compilers.run                       everything
python -m tests.compilers.run --only clang --random 5
python -m tests.compilers.run --sanitize            AddressSanitizer and UBSan instead

Results are kept in a file: a run goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.compilers.compilers import Build, builds, found_compilers, sanitized
from tests.compilers.corpus import corpus

Results = dict[str, dict[str, str]]  # build -> program -> what is wrong


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of a build's name")
    parser.add_argument("--random", type=int, default=20, help="random programs in the corpus")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--results", type=Path, default=Path("compilers.json"))
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    every = sanitized() if arguments.sanitize else builds(found_compilers())
    chosen = [build for build in every if arguments.only in str(build)]
    results: Results = {}
    if arguments.results.exists():
        results = json.loads(arguments.results.read_text())
    total = len(corpus(arguments.random))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as progress:
        bar = progress.add_task("", total=total * len(chosen))
        for build in chosen:
            progress.update(bar, description=str(build)[:60])
            done = results.setdefault(str(build), {})
            progress.advance(bar, len(done))
            while len(done) < total:
                run_build(build, done, arguments.random, lambda: progress.advance(bar))
                arguments.results.write_text(json.dumps(results, indent=1))
    Console().print(table(results, [str(build) for build in chosen]))
    return int(any(wrong for build in chosen for wrong in results[str(build)].values()))


def run_build(
    build: Build, done: dict[str, str], num_random: int, advance: Callable[[], None]
) -> None:
    """Run what is not done yet; a program that ends the process is wrong, and the next goes on."""
    command = [sys.executable, "-m", "tests.compilers.worker", "--random", str(num_random)]
    with tempfile.TemporaryDirectory(prefix="perfuse-compilers-") as cache:
        environment = {**os.environ, **build.environment(), "PERFUSE_CACHE_DIR": cache}
        process = subprocess.Popen(
            [*command, "--skip", str(len(done))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        output, errors = process.communicate()
    for line in output.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            done[found["program"]] = found["wrong"]
            advance()
    names = list(corpus(num_random))
    if process.returncode and len(done) < len(names):
        done[names[len(done)]] = f"the process ended: {errors.strip()[-2000:]}"
        advance()


def table(results: Results, chosen: list[str]) -> Table:
    made = Table("build", "programs", "wrong", "which")
    for build in chosen:
        wrong = {name: what for name, what in results[build].items() if what}
        which = "; ".join(f"{name}: {what[:120]}" for name, what in wrong.items())
        made.add_row(build, str(len(results[build])), str(len(wrong)), which)
    return made


if __name__ == "__main__":
    sys.exit(main())
