"""Races between libraries: who wins, what is remembered, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from perfuse.autotune import products
from perfuse.autotune.products import Decision, Product, choose_products, decide, race
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.ir.program import LibraryCall, Program
from perfuse.testing import fresh_cache
from tests.unit.lower.rows import compiled
from tests.unit.lower.samples import f32

LINEAR = products.LINEAR
PRODUCT = Product(64, 256, 256, (256, 1), (256, 1), has_bias=False)


class Time:
    """A clock that moves only when a run says how long it took."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_runs = 0

    def __call__(self) -> float:
        return self.now

    def run(self, result: torch.Tensor, milliseconds: list[float]) -> Callable[[], torch.Tensor]:
        turns = iter(range(1 << 30))

        def taking() -> torch.Tensor:
            self.num_runs += 1
            self.now += 1e-3 * milliseconds[next(turns) % len(milliseconds)]
            return result

        return taking


@dataclass(frozen=True)
class Row:
    """`library` and `linear`: milliseconds of each turn, again and again."""

    name: str
    library: list[float]
    linear: list[float]
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


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_race(row: Row) -> None:
    clock, result = Time(), f32(8, 8)
    runs = {
        "library": clock.run(result, row.library),
        LINEAR: clock.run(result + row.error * result.abs().max(), row.linear),
    }
    decision = race(runs, clock)
    assert (decision.chosen == LINEAR) == row.wins, decision


def test_times_are_reported_in_milliseconds() -> None:
    clock, result = Time(), f32(8, 8)
    decision = race({"library": clock.run(result, [4]), LINEAR: clock.run(result, [2])}, clock)
    assert decision.milliseconds == {"library": 4.0, LINEAR: 2.0}


# milliseconds of a turn, runs of both together (one each to compare the results)
LENGTHS = [(1000.0, 2 + 2 * 3), (0.01, 2 + 2 * 60)]


@pytest.mark.parametrize("row", LENGTHS, ids=str)
def test_a_race_ends(row: tuple[float, int]) -> None:
    clock, result = Time(), f32(8, 8)
    race({name: clock.run(result, [row[0]]) for name in ("library", LINEAR)}, clock)
    assert clock.num_runs == row[1]


@pytest.fixture
def context() -> Iterator[Context]:
    """A context with an empty cache and counters of its own."""
    with fresh_cache():
        yield replace(Context.default(), counters=Counters())


def test_decision_is_remembered(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    first = decide(PRODUCT, context)
    monkeypatch.setattr(products, "race", None)  # to measure again would fail
    assert decide(PRODUCT, context) == first
    counts = context.counters.snapshot()
    assert counts["autotune.products_measured"] == counts["autotune.cache_hit"] == 1


def test_other_products_are_measured_on_their_own(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "race", lambda runs, exact: Decision("library", {}, "a test"))
    for other in (PRODUCT, replace(PRODUCT, rows=32), replace(PRODUCT, b_strides=(1, 256))):
        decide(other, context)
    assert context.counters.snapshot()["autotune.products_measured"] == 3


@pytest.mark.parametrize("has_bias", [False, True])
def test_candidates_agree(has_bias: bool) -> None:
    strided = replace(PRODUCT, b_strides=(1, 300), has_bias=has_bias)
    library, linear = (run().clone() for run in products.candidates(strided).values())
    # Each sums 256 products in an order of its own.
    limit = 2 * 256 * torch.finfo(torch.float32).eps * float(library.abs().max())
    assert float((library - linear).abs().max()) <= limit


def test_random_state_is_untouched(context: Context) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    decide(PRODUCT, context)
    assert torch.equal(torch.get_rng_state(), before)


def program_of(fn: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Program:
    programs: list[Program] = []
    compiled(fn, programs)(*inputs)
    return programs[0]


def calls(program: Program) -> list[str]:
    return [node.op for node in program.nodes if isinstance(node, LibraryCall)]


LARGE = (f32(64, 256), f32(256, 256))


def test_winner_replaces_the_call(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "decide", lambda *_: Decision(LINEAR, {}, "a test"))
    program = program_of(torch.mm, *LARGE)
    chosen = choose_products(program, context)
    assert calls(program) == ["aten.mm.out"] and calls(chosen) == [LINEAR]


def test_setting_leaves_the_program_alone(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "decide", None)
    settings = context.settings.with_overrides({"cpu.tune_products": False})
    program = program_of(torch.mm, *LARGE)
    assert choose_products(program, replace(context, settings=settings)) is program


UNTOUCHED = [
    ("small", (f32(8, 8), f32(8, 8))),
    ("double", tuple(x.double() for x in LARGE)),
    ("bf16", tuple(x.bfloat16() for x in LARGE)),
]


@pytest.mark.parametrize("row", UNTOUCHED, ids=lambda row: row[0])
def test_no_race_for(
    row: tuple[str, tuple[torch.Tensor, ...]], context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "decide", None)
    program = program_of(torch.mm, *row[1])
    assert choose_products(program, context).nodes == program.nodes


def test_a_challenger_that_rounds_worse_never_wins() -> None:
    exact = torch.ones(4, 4, dtype=torch.float64)
    clock = Time()
    near, far = torch.full((4, 4), 1 + 1e-6), torch.full((4, 4), 1 + 3e-6)
    runs = {"library": clock.run(near, [4]), LINEAR: clock.run(far, [1])}
    decision = race(runs, clock, exact=exact)
    assert decision.chosen == "library" and "times the default's" in decision.reason
