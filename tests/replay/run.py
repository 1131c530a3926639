"""Which generated code changed: a corpus of programs, for four targets, against kept hashes.

python -m tests.replay.run                         compare; show how the first programs differ
python -m tests.replay.run --only 'model/.*'       some of the corpus
python -m tests.replay.run --update                keep what is generated now

A change that only moves code around changes no hash. One that means to change generated code keeps
the new hashes in the same commit, and says why. The earlier text is generated again, by the commit
that last kept hashes (or `--against`), in a worktree of its own.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.harness.pool import Result, Task, run_tasks
from tests.replay.corpus import names
from tests.replay.hashes import KEPT, Hashes, Record, changed_parts, comparable, installed
from tests.replay.hashes import read as read_hashes
from tests.replay.hashes import write as write_hashes

TIMEOUT_S = 600.0
ROOT = Path(__file__).parents[2]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="regular expression on names of programs")
    parser.add_argument("--names", nargs="*", help="these programs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--update", action="store_true", help="keep what is generated now")
    parser.add_argument("--write", type=Path, help="write all texts into this folder")
    parser.add_argument("--against", help="the commit to show differences with")
    parser.add_argument("--show", type=int, default=3, help="programs whose differences are shown")
    parser.add_argument("--lines", type=int, default=60, help="lines of each difference")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 150)
    wanted = arguments.names or [n for n in names() if re.search(arguments.only, n)]
    found, failed = generate(wanted, arguments.jobs, arguments.write, console)
    for name, message in failed.items():
        console.print(f"failed {name}: {message}", markup=False)
    if arguments.write:
        return int(bool(failed))
    kept = read_hashes()
    if arguments.update:
        write_hashes(updated(kept, found))
        console.print(f"{len(found)} programs kept in {KEPT.relative_to(ROOT)}")
        return int(bool(failed))
    changes = changes_of(kept, found, console)
    if changes:
        show_differences(changes, arguments, console)
    return int(bool(changes or failed))


def updated(kept: Record, found: dict[str, Hashes]) -> Record:
    """Hashes made with other packages are not kept beside these."""
    rest = {n: h for n, h in kept.programs.items() if comparable(n, kept) and n in names()}
    return Record(installed(), rest | found)


def generate(
    wanted: list[str], jobs: int, folder: Path | None, console: Console
) -> tuple[dict[str, Hashes], dict[str, str]]:
    """The hashes of each program, and why there are none."""
    found: dict[str, Hashes] = {}
    failed: dict[str, str] = {}
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("replay", total=len(wanted))

        def record(task: Task, result: Result) -> None:
            progress.advance(bar)
            if result["status"] == "pass":
                found[task["name"]] = result["hashes"]
            else:
                failed[task["name"]] = f"{result['status']}: {result['message']}"

        tasks = [{"name": n, "folder": str(folder) if folder else None} for n in wanted]
        # A process's threads and hash seed must not matter; workers draw seeds of their own.
        env = {"OMP_NUM_THREADS": "1"}
        run_tasks(
            "tests.replay.worker",
            tasks,
            jobs=jobs,
            timeout_s=TIMEOUT_S,
            on_result=record,
            env=env,
        )
    return found, failed


def changes_of(
    kept: Record, found: dict[str, Hashes], console: Console
) -> dict[str, tuple[str, ...]]:
    """The programs whose code changed, and the parts of each; a summary of all is printed."""
    skipped = [n for n in found if n in kept.programs and not comparable(n, kept)]
    new = [n for n in found if n not in kept.programs]
    judged = [n for n in found if n in kept.programs and n not in skipped]
    changes = {}
    for name in judged:
        if parts := changed_parts(kept.programs[name], found[name]):
            changes[name] = tuple(parts)
    targets = Counter(t for parts in changes.values() for t in {p.split("/")[0] for p in parts})
    console.print(
        f"{len(judged)} programs compared: {len(judged) - len(changes)} unchanged, "
        f"{len(changes)} changed ({', '.join(f'{t} {n}' for t, n in targets.items()) or 'none'})"
    )
    if new:
        console.print(f"{len(new)} programs without kept hashes, such as {new[0]}: --update")
    if skipped:
        console.print(
            f"{len(skipped)} programs not compared: hashes are of {kept.packages}, "
            f"here is {installed()}"
        )
    return changes


def show_differences(
    changes: dict[str, tuple[str, ...]], arguments: argparse.Namespace, console: Console
) -> None:
    """Texts of the commit before beside those of now, for the programs that changed least."""
    for name, parts in changes.items():
        console.print(f"changed {name}: {', '.join(parts)}", markup=False, soft_wrap=True)
    shown = sorted(changes, key=lambda n: len(changes[n]))[: arguments.show]
    base = arguments.against or last_kept()
    if not shown or not base:
        return
    with tempfile.TemporaryDirectory() as scratch:
        before, after = Path(scratch, "before"), Path(scratch, "after")
        generate(shown, arguments.jobs, after, console)
        write_at(base, shown, before)
        for name in shown:
            for part in changes[name]:
                lines = difference(before / name / part, after / name / part)
                text = "\n".join(lines[: arguments.lines]) or "the same text as at that commit"
                console.print(f"\n{name} {part}, since {base[:12]}\n{text}", markup=False)


def last_kept() -> str:
    """The commit that last kept hashes."""
    asked = ["git", "log", "-1", "--format=%H", "--", str(KEPT)]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def write_at(revision: str, wanted: list[str], folder: Path) -> None:
    """The texts that another commit generates, written into a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            command = [sys.executable, "-m", "tests.replay.run", "--write", str(folder)]
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            subprocess.run([*command, "--names", *wanted], cwd=tree, env=environment, check=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def difference(before: Path, after: Path) -> list[str]:
    old, new = (p.read_text().splitlines() if p.exists() else [] for p in (before, after))
    return list(difflib.unified_diff(old, new, "before", "after", lineterm=""))


if __name__ == "__main__":
    raise SystemExit(main())
