"""The first call of a compiled case in a new process: how long a user waits.

    python -m benchmarks.first_call CASE --backend perfuse

Imports that happen during the call are timed and left out, in the same way for every backend.
Whether the call is cold or warm is decided by the cache folders in the environment.
"""

from __future__ import annotations

import argparse
import builtins
import json
import re
import resource
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.catalogue import catalogue


class ImportClock:
    """Seconds spent in import statements, nested ones counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.depth = 0
        self.original = builtins.__import__

    def __enter__(self) -> ImportClock:
        builtins.__import__ = self.timed_import
        return self

    def __exit__(self, *_: object) -> None:
        builtins.__import__ = self.original

    def timed_import(self, *args: Any, **kwargs: Any) -> Any:
        if self.depth:
            return self.original(*args, **kwargs)
        self.depth += 1
        began = time.perf_counter()
        try:
            return self.original(*args, **kwargs)
        finally:
            self.depth -= 1
            self.seconds += time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--backend", default="perfuse")
    parser.add_argument("--cache", type=Path, help="the cache folder, to count the peer's kernels")
    arguments = parser.parse_args()
    problem = catalogue()[arguments.case].build()
    problem.step(problem.function)  # eager's own first-call costs are not the compiler's
    children_before = children_seconds()
    with ImportClock() as clock:
        began = time.perf_counter()
        candidate = torch.compile(problem.function, backend=arguments.backend)
        problem.step(candidate)
        total = time.perf_counter() - began
    result = {
        "seconds": total - clock.seconds,
        "import_seconds": clock.seconds,
        "compiler_seconds": children_seconds() - children_before,
        "kernels": num_kernels(arguments.backend, arguments.cache),
    }
    print(json.dumps(result))


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def num_kernels(backend: str, cache: Path | None) -> int | None:
    """Kernels in the programs: ours by counter, the peer's from the wrappers in its cache."""
    if backend == "perfuse":
        import perfuse

        return perfuse.counters["schedule.kernels"]
    if cache is None:
        return None
    wrappers = [p.read_text(errors="ignore") for p in cache.rglob("*.py")]
    return sum(len(re.findall(r"^\w+ = async_compile\.cpp", w, re.M)) for w in wrappers)


if __name__ == "__main__":
    main()
