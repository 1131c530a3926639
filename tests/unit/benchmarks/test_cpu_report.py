"""Figures of a benchmark run: medians over processes, and what was asked for and not given."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import report, targets
from benchmarks.interleaved import CpuClock
from benchmarks.report import OURS, PEER, Row


def run(eager: float, peer: float, ours: float, **more: float) -> Row:
    """One process: its medians in milliseconds; the best rounds took half of that."""
    times = {"eager": eager, PEER: peer, OURS: ours}
    return {
        "times_ms": {k: {"median": v, "best": v / 2, "rounds": 5} for k, v in times.items()},
        "failures": {},
        **more,
    }


def row(name: str, ratio: float, of_memory: float = 1.0) -> Row:
    found = report.run_row(name, [run(1.0, ratio, 1.0, bytes=1e6 * of_memory, memory_gb_s=1.0)])
    return {**found, "name": name}


def test_a_ratio_is_taken_inside_each_process() -> None:
    # Slow processes are slow for everybody: the ratio of the medians would be 2 / 2.
    found = report.run_row("x", [run(1, 2, 1), run(9, 6, 2), run(1, 1, 4)])
    assert found["over_peer"] == 2.0
    assert found["ours_ms"] == 2.0
    assert found["best_over_peer"] == 2.0


def test_memory_s_share_is_bytes_over_time() -> None:
    assert row("add", 1.0, 0.5)["of_memory"] == pytest.approx(0.5)


def test_who_failed_has_no_figures() -> None:
    broken = {"times_ms": {}, "failures": {OURS: "no answer"}}
    found = report.run_row("x", [broken, broken])
    assert found["over_peer"] is None and found["failures"] == "Perfuse: no answer"
    assert targets.missed("kernels", [found])[0] == "x failed"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row("mish", 4.0, 0.2), row("add", 1.0)], []),
        ([row("mish", 5.0), row("swish", 0.98)], ["swish 0.98x < 1.0x"]),
        ([row("add", 3.0, 0.8)], ["add 80% of memory < 85%"]),
        ([row("mish", 1.9)], ["geometric mean 1.90 < 2.0"]),
        ([row("mish", 2.0), row("mm_gelu_512", 0.5)], []),
    ],
)
def test_each_target_that_was_missed_is_named(rows: list[Row], expected: list[str]) -> None:
    assert targets.missed("kernels", rows) == expected


def test_models_have_targets_of_their_own() -> None:
    assert targets.missed("models", [row("bert", 0.98), row("gpt2", 1.2)]) == []
    assert targets.missed("models", [row("bert", 0.96), row("gpt2", 1.2)]) == ["bert 0.96x < 0.97x"]
    assert targets.missed("overhead", [row("call", 0.5)]) == []


def test_a_csv_has_the_figures_and_not_the_rounds(tmp_path: Path) -> None:
    report.write_csv(tmp_path / "kernels.csv", [row("add", 1.5)])
    (read,) = csv.DictReader((tmp_path / "kernels.csv").open())
    assert read["over_peer"] == "1.5" and "runs" not in read


def test_a_turn_begins_with_a_call_that_does_not_count() -> None:
    calls = []
    clock = CpuClock({"quick": lambda: calls.append(1)})
    clock.batches["quick"] = 3
    calls.clear()
    clock("quick", lambda: calls.append(1))
    assert len(calls) == 4
