"""The race: who wins, what refuses a rival, when it ends; and decisions as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from perfuse.autotune.exactness import error_gate
from perfuse.autotune.race import Rules, race
from perfuse.decision import FORMAT, Choice, Decision, library
from perfuse.errors import MALFORMED, KernelTooLarge
from tests.unit.lower.samples import f32

DEFAULT, CHALLENGER = library("aten.mm.out"), library("another")
RULES = Rules(margin=0.96, unseen_s=1e-5)


class Time:
    """A clock that moves only when a run says how long it took."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_runs = 0

    def __call__(self) -> float:
        return self.now

    def run(self, result: Any, milliseconds: list[float]) -> Callable[[], Any]:
        turns = iter(range(1 << 30))

        def taking() -> Any:
            self.num_runs += 1
            self.now += 1e-3 * milliseconds[next(turns) % len(milliseconds)]
            return result

        return taking


@dataclass(frozen=True)
class Row:
    """`default` and `challenger`: milliseconds of each turn, again and again."""

    name: str
    default: list[float]
    challenger: list[float]
    wins: bool
    error: float = 0.0

    def __str__(self) -> str:
        return self.name


ROWS = [
    Row("much faster", [10], [5], wins=True),
    Row("just beyond the margin", [10], [9.5], wins=True),
    Row("within the margin", [10], [9.7], wins=False),
    Row("by less than what a race does not see", [0.1], [0.092], wins=False),
    Row("equal", [10], [10], wins=False),
    Row("slower", [10], [20], wins=False),
    Row("only its best turn counts", [10], [50, 5, 50], wins=True),
    Row("so does the default's best turn", [50, 5, 50], [10], wins=False),
    Row("wrong", [10], [1], wins=False, error=0.01),
    Row("not a number", [10], [1], wins=False, error=float("nan")),
    Row("rounded otherwise", [10], [1], wins=True, error=1e-6),
]


def raced(runs: dict[Choice, Callable[[], Any]], clock: Time, exact: Any = None) -> Decision:
    gate = error_gate(exact)
    return race("a test", list(runs), runs.__getitem__, RULES, gate=gate, clock=clock)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_who_wins(row: Row) -> None:
    clock, result = Time(), f32(8, 8)
    moved = result + row.error * result.abs().max()
    runs = {
        DEFAULT: clock.run(result, row.default),
        CHALLENGER: clock.run(moved, row.challenger),
    }
    decision = raced(runs, clock)
    assert (decision.chosen == CHALLENGER) == row.wins, decision


def test_every_rival_is_kept_with_its_times_or_its_refusal() -> None:
    clock, result = Time(), f32(8, 8)
    runs = {
        DEFAULT: clock.run(result, [4]),
        CHALLENGER: clock.run(result, [3, 1, 1]),
        library("wrong"): clock.run(result + 1, [1]),
    }
    decision = raced(runs, clock)
    default, challenger, wrong = decision.rivals
    assert (default.best_us, default.median_us, default.spread_us) == (4000, 4000, 0)
    assert (challenger.best_us, challenger.median_us, challenger.refusal) == (1000, 1000, "")
    assert (wrong.median_us, wrong.refusal) == (None, "its result differs")


# milliseconds of a turn, runs of both together (one each to compare the results)
LENGTHS = [(1000.0, 2 + 2 * 3), (0.01, 2 + 2 * 60)]


@pytest.mark.parametrize("row", LENGTHS, ids=str)
def test_a_race_ends(row: tuple[float, int]) -> None:
    clock, result = Time(), f32(8, 8)
    raced({choice: clock.run(result, [row[0]]) for choice in (DEFAULT, CHALLENGER)}, clock)
    assert clock.num_runs == row[1]


def test_turns_are_interleaved() -> None:
    seen: list[str] = []
    rules = Rules(margin=0.96, fewest_rounds=3, most_rounds=3)
    race("a test", [DEFAULT, CHALLENGER], lambda c: lambda: seen.append(c.name), rules)
    assert seen == [DEFAULT.name, CHALLENGER.name] * 4


def test_a_challenger_that_rounds_worse_never_wins() -> None:
    clock, exact = Time(), torch.ones(4, 4, dtype=torch.float64)
    near, far = torch.full((4, 4), 1 + 1e-6), torch.full((4, 4), 1 + 3e-6)
    runs = {DEFAULT: clock.run(near, [4]), CHALLENGER: clock.run(far, [1])}
    decision = raced(runs, clock, exact)
    assert decision.chosen == DEFAULT
    assert "times the default's" in decision.rivals[1].refusal


def failing(error: Exception) -> Callable[[], Any]:
    def run() -> Any:
        raise error

    return run


def test_a_challenger_that_cannot_run_is_refused_but_the_default_must_run() -> None:
    clock, result = Time(), f32(8, 8)
    well, ill = clock.run(result, [2]), failing(RuntimeError("too many registers"))
    decision = raced({DEFAULT: well, CHALLENGER: ill}, clock)
    assert decision.chosen == DEFAULT
    assert decision.rivals[1].refusal == "RuntimeError: too many registers"
    with pytest.raises(RuntimeError):
        raced({DEFAULT: ill, CHALLENGER: well}, clock)


def test_a_default_that_does_not_fit_is_refused_too() -> None:
    clock, result = Time(), f32(8, 8)
    large = failing(KernelTooLarge("300000 bytes", ["kernel0"]))
    assert raced({DEFAULT: large, CHALLENGER: clock.run(result, [2])}, clock).chosen == CHALLENGER
    with pytest.raises(KernelTooLarge):
        raced({DEFAULT: large}, clock)


def test_our_own_mistakes_are_raised() -> None:
    clock = Time()
    runs = {DEFAULT: clock.run(f32(8, 8), [2]), CHALLENGER: failing(TypeError("a bug"))}
    with pytest.raises(TypeError):
        raced(runs, clock)


TILE = Choice("tile", "flat 1x128", (("rows", 1), ("programs", None), ("is_swept", False)))


def test_a_decision_goes_to_json_and_back() -> None:
    clock, result = Time(), f32(8, 8)
    runs = {TILE: clock.run(result, [2]), CHALLENGER: failing(RuntimeError("no"))}
    decision = raced(runs, clock)
    text = json.dumps(decision.to_json())
    assert Decision.from_json(json.loads(text)) == decision


CHANGES: list[dict[str, Any]] = [{"format": FORMAT - 1}, {"chosen": {}}, {"rivals": [1]}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_another_format_is_not_read(change: dict[str, Any]) -> None:
    document = Decision("a test", DEFAULT, (), "").to_json()
    assert Decision.from_json(document).chosen == DEFAULT
    with pytest.raises(MALFORMED):
        Decision.from_json({**document, **change})
    with pytest.raises(MALFORMED):
        Decision.from_json({k: v for k, v in document.items() if k not in change})
