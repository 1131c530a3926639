"""Compiling candidates in threads, and the bar that shows how far tuning is."""

from __future__ import annotations

import io
import threading

from perfuse.autotune.compile_together import compile_together, num_compile_threads
from perfuse.autotune.progress import TuningProgress
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters


def test_each_kernel_is_compiled_once_and_errors_are_kept() -> None:
    built: list[str] = []

    def fails() -> None:
        raise ValueError("no")

    builds = [("a", lambda: built.append("a")), ("a", lambda: built.append("a")), ("b", fails)]
    counters = Counters()
    errors = compile_together(builds, 2, counters)
    assert built == ["a"]
    assert list(errors) == ["b"] and isinstance(errors["b"], ValueError)
    assert counters["autotune.candidates_compiled"] == 2
    assert compile_together([], 2, counters) == {}


def test_compiling_is_parallel() -> None:
    barrier = threading.Barrier(3)  # passed only by three threads at a time
    builds = [(number, lambda: barrier.wait(timeout=20)) for number in range(3)]
    assert compile_together(builds, 3, Counters()) == {}


def test_the_number_of_threads_is_a_setting() -> None:
    for wanted, most in ((3, 3), (50, 8)):
        context = Context.default(Settings().with_overrides({"compile_threads": wanted}))
        assert num_compile_threads(context, 8) == most


class Screen(io.StringIO):
    """A file that may be a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def shown(is_terminal: bool, seconds: float) -> str:
    screen, times = Screen(is_terminal), iter([0.0, seconds, seconds, seconds])
    with TuningProgress("a matmul", 3, screen, lambda: next(times)) as progress:
        assert [progress.advance(), progress.advance()] == [2, 1]
    return screen.getvalue()


def test_progress_is_shown_on_a_terminal_and_only_if_it_takes_long() -> None:
    assert "tuning a matmul" in shown(True, 2.0)
    assert shown(True, 0.5) == shown(False, 2.0) == ""
