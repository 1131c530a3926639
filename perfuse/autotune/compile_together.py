"""Candidates are compiled in parallel threads, each kernel once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from perfuse.autotune.time_limit import OutOfTime
from perfuse.context import Context
from perfuse.counters import Counters

Build = Callable[[], object]
Choosable = TypeVar("Choosable", bound=Hashable)
ALWAYS_BUILT = 2  # the default and its first challenger, no matter how little time is left


def compile_together(
    builds: Iterable[tuple[Choosable, Build]],
    num_threads: int,
    counters: Counters,
    deadline: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Choosable, Exception]:
    """Compile each distinct key once, in threads; returns the errors of those that fail.

    Those not begun by the deadline are not compiled, which is their error.
    """
    distinct = dict(builds)
    if not distinct:
        return {}

    def begun(number: int, build: Build) -> object:
        if number >= ALWAYS_BUILT and clock() >= deadline:
            raise OutOfTime
        return build()

    with ThreadPoolExecutor(num_threads, thread_name_prefix="perfuse-compile") as pool:
        waiting = {
            key: pool.submit(begun, number, build)
            for number, (key, build) in enumerate(distinct.items())
        }
    found = {key: future.exception() for key, future in waiting.items()}
    errors = {key: error for key, error in found.items() if isinstance(error, Exception)}
    skipped = sum(isinstance(error, OutOfTime) for error in errors.values())
    counters.inc("autotune.candidates_compiled", len(distinct) - skipped)
    return errors


def num_compile_threads(context: Context, num_builds: int) -> int:
    """The number of threads for some builds, by the settings."""
    wanted = context.settings.compile_threads
    return max(1, min(wanted, num_builds)) if wanted else context.num_jobs(num_builds)


def compile_in_time(builds: Sequence[tuple[Choosable, Build]], context: Context) -> list[Choosable]:
    """Compile candidates before they are measured; those for which there was no time.

    One that fails otherwise will fail again where it is measured.
    """
    num_threads = num_compile_threads(context, len(builds))
    errors = compile_together(builds, num_threads, context.counters, context.tune_until)
    return [key for key, _ in builds if isinstance(errors.get(key), OutOfTime)]
