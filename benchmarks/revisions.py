"""Two revisions of Perfuse against each other, in one interleaved run: is one slower?

    git worktree add ../before COMMIT
    python -m benchmarks.revisions ../before . --results DIR
    python -m benchmarks.revisions ../before . --device cuda --kinds overhead kernel

A case has a process for each revision, and they take turns: the ratio of a round is of two
neighbouring turns, so what disturbs the machine for longer hits both. First calls are cold, one
process after the other, in an empty cache. A ratio below 1 means that the second is faster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
TURN_S = 0.02
KINDS = ("overhead", "kernel", "model")


@dataclass(frozen=True, slots=True)
class Compared:
    """One case: medians of both in milliseconds, and the median of the ratios of rounds."""

    name: str
    kind: str
    before_ms: float
    after_ms: float
    ratio: float
    rounds: int
    first_s: tuple[float, float]


class Contestant:
    """A process that has compiled a case with one revision, and runs turns of it when asked."""

    def __init__(self, tree: Path, case: str, device: str, cores: Sequence[int]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="perfuse-revision-")
        # Of the tree, only Perfuse: the benchmarks of both are those of this one.
        package = Path(self.folder.name, "tree")
        package.mkdir()
        (package / "perfuse").symlink_to(tree / "perfuse")
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(package), str(ROOT), os.environ.get("PYTHONPATH", "")]
            ),
            "PERFUSE_CACHE_DIR": os.path.join(self.folder.name, "cache"),
            "OMP_NUM_THREADS": str(len(cores)),
        }
        # -P: the current folder, which has a perfuse too, is not searched.
        command = [sys.executable, "-P", "-m", "benchmarks.revisions", "--serve", case]
        pin = ["taskset", "-c", ",".join(map(str, cores))]
        self.process = subprocess.Popen(
            [*pin, *command, "--device", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.first_s = float(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("@"):
                return line[1:]
        raise RuntimeError("the process ended")

    def turn(self) -> float:
        """Milliseconds of a call."""
        assert self.process.stdin is not None
        self.process.stdin.write("turn\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()


def serve(name: str, device: str) -> None:
    """Compile a case, then run a turn for every line of the input."""
    import torch

    from benchmarks.catalogue import catalogue
    from benchmarks.contest import step_of
    from benchmarks.gpu_cases import gpu_cases

    case = (gpu_cases() if device == "cuda" else catalogue())[name]
    with torch.device(device):
        problem = case.build()
    step = step_of(problem, "perfuse")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    began = time.perf_counter()
    step()
    wait()
    print(f"@{time.perf_counter() - began}", flush=True)
    calls = 1
    for _ in sys.stdin:
        step()
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            step()
        wait()
        spent_s = (time.perf_counter() - began) / calls
        calls = max(1, round(TURN_S / max(spent_s, 1e-7)))
        print(f"@{1e3 * spent_s}", flush=True)


def compare(
    name: str, kind: str, trees: Sequence[Path], cores: Sequence[int], args: argparse.Namespace
) -> Compared:
    started: dict[int, Contestant] = {}
    try:
        for k in [0, 1] if len(name) % 2 else [1, 0]:  # either is the first in half of the cases
            started[k] = Contestant(trees[k], name, args.device, cores)
        contestants = [started[0], started[1]]
        for contestant in contestants * 3:  # warm, and the number of calls in a turn settled
            contestant.turn()
        times: list[tuple[float, float]] = []
        deadline = time.monotonic() + args.budget
        while len(times) < 8 or (time.monotonic() < deadline and len(times) < 300):
            first, second = contestants if len(times) % 2 else contestants[::-1]
            found = {id(c): c.turn() for c in (first, second)}
            times.append((found[id(contestants[0])], found[id(contestants[1])]))
    finally:
        for contestant in started.values():
            contestant.close()
    before, after = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(new / old for old, new in times)
    first_s = (contestants[0].first_s, contestants[1].first_s)
    return Compared(name, kind, before, after, ratio, len(times), first_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", type=Path, help="checkouts: before, after")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--only", default="", help="regular expression on the names of cases")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds of turns a case")
    parser.add_argument("--lanes", type=int, default=1, help="cases measured at once")
    parser.add_argument("--cores", type=int, default=2, help="cores of a lane")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds in all")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.device)
        return
    if len(args.trees) != 2:
        parser.error("name two checkouts: before, after")
    report(compare_all([tree.resolve() for tree in args.trees], args), args)


def compare_all(trees: list[Path], args: argparse.Namespace) -> list[Compared]:
    from benchmarks.catalogue import catalogue
    from benchmarks.gpu_cases import gpu_cases

    cases = (gpu_cases() if args.device == "cuda" else catalogue()).values()
    chosen = [c for k in args.kinds for c in cases if c.kind == k and re.search(args.only, c.name)]
    lanes: SimpleQueue[list[int]] = SimpleQueue()
    for lane in range(args.lanes):
        lanes.put(list(range(lane * args.cores, (lane + 1) * args.cores)))
    deadline = time.monotonic() + args.time_limit

    def run(name: str, kind: str) -> Compared | None:
        cores = lanes.get()
        try:
            if time.monotonic() > deadline:
                return None
            done = compare(name, kind, trees, cores, args)
            print(f"{name:40} {done.before_ms:10.4f} {done.after_ms:10.4f} {done.ratio:7.3f}",
                  flush=True)  # fmt: skip
            return done
        except Exception as error:  # one case less, not the end
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            return None
        finally:
            lanes.put(cores)

    with ThreadPoolExecutor(args.lanes) as pool:
        found = list(pool.map(lambda case: run(case.name, case.kind), chosen))
    return [row for row in found if row is not None]


def report(rows: list[Compared], args: argparse.Namespace) -> None:
    from benchmarks import machine

    table = Table("kind", "cases", "geometric mean after / before", "least", "most",
                  title=f"{args.trees[1]} against {args.trees[0]}")  # fmt: skip
    for kind in KINDS:
        add_row(table, kind, [row.ratio for row in rows if row.kind == kind])
    add_row(table, "first calls", [row.first_s[1] / row.first_s[0] for row in rows])
    Console(width=110).print(table)
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        document = {"machine": machine.describe(), "rows": [asdict(row) for row in rows]}
        path = args.results / f"revisions-{args.device}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")


def add_row(table: Table, kind: str, ratios: list[float]) -> None:
    if ratios:
        mean = f"{statistics.geometric_mean(ratios):.4f}"
        table.add_row(kind, str(len(ratios)), mean, f"{min(ratios):.3f}", f"{max(ratios):.3f}")


if __name__ == "__main__":
    main()
