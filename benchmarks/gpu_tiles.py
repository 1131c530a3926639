"""What tuning measures: every candidate tile of each kernel of a case, in microseconds.

python -m benchmarks.gpu_tiles --only '^(ce|ln_fp8)$'
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.cases import Case
from benchmarks.contest import step_of
from benchmarks.gpu_cases import gpu_cases
from perfuse.testing import fresh_cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="regular expression on the names of cases")
    parser.add_argument("--mode", default="max-autotune-no-cudagraphs")
    arguments = parser.parse_args()
    console = Console(width=140)
    for case in gpu_cases().values():
        if case.kind == "kernel" and re.search(arguments.only, case.name):
            with fresh_cache() as folder:
                _run(case, arguments.mode)
                _show(console, case.name, folder)


def _run(case: Case, mode: str) -> None:
    with torch.device("cuda"):
        problem = case.build()
    step_of(problem, f"perfuse:{mode}")()
    torch.cuda.synchronize()


def _show(console: Console, name: str, folder: Path) -> None:
    for path in sorted(folder.rglob("tile.json")):
        rows = json.loads(path.read_text())["microseconds"]
        best = min(time for _, time in rows)
        shown = "; ".join(f"{'*' if t == best else ''}{t:.1f} {tile}" for tile, t in rows)
        console.print(f"{name}: {shown}", highlight=False)


if __name__ == "__main__":
    main()
