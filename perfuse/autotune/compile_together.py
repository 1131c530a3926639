"""Candidates are compiled in parallel threads, each kernel once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from perfuse.context import Context
from perfuse.counters import Counters

Build = Callable[[], object]


def compile_together(
    builds: Iterable[tuple[Hashable, Build]], num_threads: int, counters: Counters
) -> dict[Hashable, Exception]:
    """Compile what has a key of its own, in threads; the errors of those that fail."""
    distinct: Mapping[Hashable, Build] = dict(builds)
    if not distinct:
        return {}
    with ThreadPoolExecutor(num_threads, thread_name_prefix="perfuse-compile") as pool:
        waiting = {key: pool.submit(build) for key, build in distinct.items()}
    counters.inc("autotune.candidates_compiled", len(distinct))
    errors = {key: future.exception() for key, future in waiting.items()}
    return {key: error for key, error in errors.items() if isinstance(error, Exception)}


def num_compile_threads(context: Context, num_builds: int) -> int:
    """The number of threads for some builds, as the settings say."""
    wanted = context.settings.compile_threads
    return max(1, min(wanted, num_builds)) if wanted else context.num_jobs(num_builds)
