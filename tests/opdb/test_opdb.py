"""The operator database in CI: every operator at float32, a slice of them in the other dtypes.

An operator with a gradient is seen in a training step, whose results are compared as well; of their
forward rows a slice is left.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

from tests.harness.backend import default_backend
from tests.opdb.check import check_row
from tests.opdb.gaps import MAX_GAPS, known_gaps
from tests.opdb.operands import OPERANDS
from tests.opdb.rows import DTYPES, Row, rows

# One row in SLICE of the dtypes other than float32, the same ones every time.
SLICE = 12
# One forward row in SEEN_SLICE of those whose operator is seen in a training step.
SEEN_SLICE = 8
# One row in PLACED_SLICE is called on operands that do not start their storage.
PLACED_SLICE = 24
QUICK_SAMPLES = {"forward": 2, "backward": 1}
FULL_SAMPLES = {"forward": 16, "backward": 4}


def selected(full: bool) -> list[Row]:
    every = list(rows(list(DTYPES)))
    known = set(every)
    return every if full else [r for r in every if is_quick(r, known)]


def is_quick(row: Row, every: set[Row]) -> bool:
    if row.dtype != "float32":
        return is_in_slice(row, SLICE)
    is_seen = row.mode == "forward" and replace(row, mode="backward") in every
    return not is_seen or is_in_slice(row, SEEN_SLICE)


def is_in_slice(row: Row, size: int) -> bool:
    return zlib.crc32(str(row).encode()) % size == 0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        full = bool(metafunc.config.getoption("--opdb-full"))
        metafunc.parametrize("row", selected(full), ids=str)


def test_matches_eager(row: Row, request: pytest.FixtureRequest) -> None:
    full = bool(request.config.getoption("--opdb-full"))
    samples = (FULL_SAMPLES if full else QUICK_SAMPLES)[row.mode]
    outcome = check_row(row, default_backend(), samples)
    if outcome.status in ("skip", "capture"):
        pytest.skip(f"{outcome.status}: {outcome.message}")
    gap = known_gaps().get(row)
    if gap is None:
        assert outcome.status == "pass", f"{outcome.status}: {outcome.message}"
    elif outcome.status == "pass":
        pytest.fail(f"{row} passes: delete its line from known_gaps.txt and lower MAX_GAPS")
    else:
        pytest.xfail(gap)


def placed_elsewhere() -> list[Row]:
    """A sample of the operators, each with its operands in another kind of place."""
    every = list(rows(["float32", "int64"], ["forward"]))
    kinds = [kind for kind in OPERANDS if kind != "dense"]
    chosen = [r for r in every if zlib.crc32(f"{r} elsewhere".encode()) % PLACED_SLICE == 0]
    return [replace(r, operands=kinds[i % len(kinds)]) for i, r in enumerate(chosen)]


@pytest.mark.parametrize("placed", placed_elsewhere(), ids=str)
def test_operands_in_other_places(placed: Row) -> None:
    outcome = check_row(placed, default_backend(), 2)
    if outcome.status in ("skip", "capture"):
        pytest.skip(f"{outcome.status}: {outcome.message}")
    dense = replace(placed, operands="dense")
    assert outcome.status == "pass" or dense in known_gaps(), f"{outcome.status}: {outcome.message}"


def test_gaps_only_shrink() -> None:
    assert len(known_gaps()) <= MAX_GAPS, "a new gap is a bug to fix, not a line to add"


def test_gaps_name_rows_that_exist() -> None:
    unknown = set(known_gaps()) - set(rows(list(DTYPES)))
    assert not unknown, f"no such rows: {sorted(map(str, unknown))}"
