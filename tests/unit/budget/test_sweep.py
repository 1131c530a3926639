"""The sweep of the benchmark notices what it is there to notice."""

from __future__ import annotations

from benchmarks.budget import complaints
from benchmarks.report import Row


def row(model: str, measured: int, off: float = 0.0) -> Row:
    return {"model": model, "budget": 100, "measured": measured, "off": off}


def test_each_model_falls_by_itself() -> None:
    assert complaints([row("a", 100), row("a", 90), row("b", 200), row("b", 200)]) == []


def test_rising_and_wrong_peaks_are_told() -> None:
    (rising,) = complaints([row("a", 90), row("a", 100)])
    assert rising.endswith("a smaller budget took more")
    (wrong,) = complaints([row("a", 100, off=-0.11)])
    assert "-11.0 % off" in wrong
