"""Random programs with changing Python values, in several processes on one cache.

python -m tests.captures.run --count 500 --processes 3
python -m tests.captures.run --seed 17 --count 1 --cache /tmp/cache
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--processes", type=int, default=3, help="how many, one after another")
    parser.add_argument("--batch", type=int, default=25, help="programs a process")
    parser.add_argument("--cache", type=Path, help="a cache to keep; by default one of its own")
    parser.add_argument("--only", type=int, help="be the process of this number")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.only is not None:
        return be_process(arguments)
    with tempfile.TemporaryDirectory(prefix="perfuse-captures-") as folder:
        cache = arguments.cache or Path(folder)
        found: Counter[str] = Counter()
        for first in range(arguments.seed, arguments.seed + arguments.count, arguments.batch):
            count = min(arguments.batch, arguments.seed + arguments.count - first)
            for process in range(arguments.processes):
                outcomes = run_process(first, count, process, cache)
                found.update(outcome["status"] for outcome in outcomes)
                for outcome in outcomes:
                    if outcome["status"] in ("wrong", "error"):
                        print(f"seed {outcome['seed']}: {outcome['text']}", flush=True)
            print(f"up to seed {first + count}: {dict(found)}", flush=True)
    return int(found["wrong"] + found["error"] > 0)


def run_process(first: int, count: int, process: int, cache: Path) -> list[dict[str, Any]]:
    """The outcome of each program in a new process on this cache, and the counters of captures."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.captures.run", "--only", str(process), "--seed", str(first),
         "--count", str(count)],
        cwd=ROOT,
        env={**os.environ, "PERFUSE_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    rows = [json.loads(line) for line in made.stdout.splitlines() if line.startswith("{")]
    missing = set(range(first, first + count)) - {row["seed"] for row in rows}
    lost = (
        [{"seed": min(missing), "status": "error", "text": made.stderr[-500:]}] if missing else []
    )
    return rows + lost


def be_process(arguments: argparse.Namespace) -> int:
    import dataclasses

    from tests.captures.check import check_program

    for seed in range(arguments.seed, arguments.seed + arguments.count):
        print(json.dumps(dataclasses.asdict(check_program(seed, arguments.only))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
