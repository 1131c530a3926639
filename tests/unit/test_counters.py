"""Counting: nothing is lost between threads, and the table can be read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from perfuse.counters import Counters


def test_counts_and_forgets() -> None:
    counters = Counters()
    counters.inc("b")
    counters.inc("a.x", 1234)
    assert (counters["a.x"], counters["b"], counters["never"]) == (1234, 1, 0)
    assert counters.snapshot() == {"a.x": 1234, "b": 1}
    assert str(counters) == "a.x  1,234\nb        1"
    counters.clear()
    assert len(counters) == 0 and str(counters) == "(nothing counted)"


def test_threads_lose_nothing() -> None:
    counters = Counters()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(counters.inc, ["n"] * 8000))
    assert counters["n"] == 8000
