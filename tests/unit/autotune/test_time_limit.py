"""The time for tuning: one limit for a graph, the best so far when it ends, a second by default."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from perfuse.autotune import matmuls
from perfuse.autotune.compile_together import compile_in_time, compile_together
from perfuse.autotune.matmuls import tune_matmuls
from perfuse.autotune.race import Rules, race
from perfuse.autotune.search import turns, wall_timer
from perfuse.autotune.stored import stored_or_measured
from perfuse.autotune.time_limit import DEFAULT_MODE_S, OutOfTime, limited, seconds_left
from perfuse.candidates.request import RandomTensor
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.decision import OUT_OF_TIME, Choice, Decision, Rival, undecided, unremembered
from perfuse.ir.program import Matmul
from perfuse.schedule.plan import Plan
from tests.unit.autotune.questions import question
from tests.unit.graph.tracing import traced
from tests.unit.lower.samples import f32
from tests.unit.planning import plan_of

ASKED = question()
FIRST, SECOND, THIRD = (Choice("library", name) for name in ("first", "second", "third"))
RULES = Rules(margin=0.9, fewest_rounds=3, most_rounds=3)


def with_settings(context: Context, **changes: Any) -> Context:
    return replace(context, settings=context.settings.with_overrides(changes))


@pytest.mark.parametrize(
    ("changes", "limit_s"),
    [
        ({"max_autotune": True}, 60.0),
        ({"max_autotune_gemm": True, "tune_seconds": 5}, 5.0),
        ({"max_autotune": True, "tune_seconds": 0}, math.inf),
        ({"max_autotune": False}, DEFAULT_MODE_S),
        ({"max_autotune": False, "tune_seconds": 0}, DEFAULT_MODE_S),
    ],
)
def test_the_limit_is_that_of_the_mode(
    changes: dict[str, Any], limit_s: float, context: Context
) -> None:
    left = seconds_left(limited(with_settings(context, **changes)))
    assert left == limit_s or limit_s - 0.5 < left <= limit_s


def decision_of(refusal: str, *, is_late: bool = False) -> Decision:
    first, second, *_ = ASKED.candidates
    rivals = (Rival(first, 1.0, 1.0, 0.0), Rival(second, refusal=refusal, is_late=is_late))
    return Decision("a test", first, rivals, "raced")


def measured(context: Context, measure: Callable[[], Decision]) -> Decision:
    return stored_or_measured(ASKED, "a test", context, measure, "autotune.matmuls_measured")


def test_the_default_stays_where_no_time_is_left(context: Context) -> None:
    over = replace(context, tune_until=time.perf_counter() - 1)
    decision = measured(over, lambda: pytest.fail("it was measured"))
    assert decision.chosen == ASKED.candidates[0] and decision.is_open
    assert decision.reason == OUT_OF_TIME and context.counters["autotune.out_of_time"] == 1
    strict = {"autotune_fallback_to_aten": False, "max_autotune_gemm_backends": "CPP"}
    bound = with_settings(over, max_autotune=True, **strict)
    assert measured(bound, lambda: decision_of("slower")).reason == "raced", "it has no default"


def test_what_was_cut_short_is_not_remembered(context: Context) -> None:
    cut = decision_of(f"not run: {OUT_OF_TIME}", is_late=True)
    for decision in (cut, unremembered(decision_of("slower"))):
        assert not decision.is_final and Decision.from_json(decision.to_json()) == decision
    assert measured(context, lambda: cut).rivals == cut.rivals
    whole = decision_of("its result differs")
    assert measured(context, lambda: whole).rivals == whole.rivals
    assert measured(context, lambda: cut).rivals == whole.rivals, "the whole one is remembered"


def test_a_race_ends_with_the_best_so_far() -> None:
    now = [0.0]
    seconds = {FIRST: 2.0, SECOND: 1.0, THIRD: 0.5}

    def enter(choice: Choice) -> Callable[[], None]:
        def run() -> None:
            now[0] += seconds[choice]

        return run

    choices = [FIRST, SECOND, THIRD]
    decision = race("a test", choices, enter, RULES, clock=lambda: now[0], deadline=2.5)
    assert decision.chosen == SECOND and not decision.is_final
    assert [rival.refusal for rival in decision.rivals] == ["", "", OUT_OF_TIME]
    assert now[0] == 3.0 + 3.0, "each ran once, and then one round"


def test_candidates_that_come_too_late_are_not_compiled(context: Context) -> None:
    built: list[int] = []
    builds = [(number, lambda number=number: built.append(number)) for number in range(4)]
    counters = Counters()
    errors = compile_together(builds, 2, counters, deadline=1.0, clock=lambda: 2.0)
    assert sorted(built) == [0, 1] and counters["autotune.candidates_compiled"] == 2
    assert all(isinstance(error, OutOfTime) for error in errors.values()) and len(errors) == 2
    assert compile_in_time(builds, replace(context, tune_until=0.0)) == [2, 3]


def decided(speed: float, monkeypatch: pytest.MonkeyPatch) -> list[matmuls.CpuMatmul]:
    """The matmuls that were raced, by a library whose rival is twice as fast as its default."""
    raced: list[matmuls.CpuMatmul] = []

    def decide(problem: matmuls.CpuMatmul, context: Context, share_s: float) -> Decision:
        choices = matmuls.choices_of(problem)
        question = matmuls.question_of(problem, choices, context)
        if not share_s:
            return undecided(str(problem), question, OUT_OF_TIME)
        raced.append(problem)
        slow_us = 1e6 * problem.work / speed
        times = [slow_us] + [slow_us / 2] * (len(choices) - 1)
        rivals = tuple(Rival(c, t, t, 0.0) for c, t in zip(choices, times, strict=True))
        return Decision(str(problem), choices[-1], rivals, "a test", question)

    monkeypatch.setattr(matmuls, "decide", decide)
    return raced


def many(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
    """One matmul of each size but the smallest, of which there are two."""
    return [x @ y, (x * 2) @ y, x @ z, z @ z.t(), x @ x.t()]


def tuned(context: Context, fn: Callable[..., Any], *args: torch.Tensor) -> Plan:
    plain = with_settings(context, max_autotune=False, **{"thresholds.tuned_matmul_work": 1})
    return tune_matmuls(plan_of(traced(fn, *args)), plain)


def test_matmuls_that_are_computed_often_are_tuned_first(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    raced = decided(1e12, monkeypatch)
    tuned(context, many, f32(8, 16), f32(16, 32), f32(16, 64))
    assert [p.work for p in raced] == [8 * 16 * 32, 16 * 64 * 16, 8 * 16 * 64, 8 * 16 * 8]


def test_matmuls_without_time_follow_the_most_similar(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited_to = replace(context, tune_until=time.perf_counter() + 100)
    # After the first one, a race of the largest is expected to take longer than is left.
    speed = 4 * 8 * 16 * 64 / 150
    raced = decided(speed, monkeypatch)
    plan = tuned(limited_to, many, f32(8, 16), f32(16, 32), f32(16, 64))
    by_work = {d.subject: d for d in plan.decisions}
    late = by_work["matmul 8x16x64"]
    assert late.subject not in {str(p) for p in raced} and late.reason == OUT_OF_TIME
    assert late.chosen == by_work["matmul 8x16x32"].chosen != matmuls.choices_of(raced[0])[0]
    assert "as in matmul 8x16x32" in next(r.refusal for r in late.rivals if r.choice == late.chosen)
    # It sums more products than any that was raced, so that nobody judged its errors.
    deeper = by_work["matmul 16x64x16"]
    assert deeper.reason == OUT_OF_TIME and deeper.chosen == deeper.rivals[0].choice


def test_a_matmul_too_large_for_the_time_is_raced_with_fewer_rows(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    raced = decided(1e12, monkeypatch)
    limited_to = replace(context, tune_until=time.perf_counter() + 100)
    monkeypatch.setattr(matmuls, "_NOMINAL_SPEED", 4 * 1024 * 16 * 32 / 150)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    plan = tuned(limited_to, lambda x, y: [x @ y], f32(1024, 16), f32(16, 32))
    assert [str(problem) for problem in raced] == ["matmul 512x16x32"]
    by_subject = {d.subject: d for d in plan.decisions}
    whole, part = by_subject["matmul 1024x16x32"], by_subject["matmul 512x16x32"]
    assert whole.reason == OUT_OF_TIME and whole.chosen == part.chosen != whole.rivals[0].choice
    assert [s.choice for s in plan.steps if isinstance(s, Matmul)] == [part.chosen]


def test_one_round_suffices_where_the_winner_is_clear() -> None:
    now = [0.0]

    def taking(seconds: float) -> Callable[[], None]:
        def run() -> None:
            now[0] += seconds

        return run

    for fast_s, rounds in ((1.0, 1), (1.9, 3)):
        runs = {"slow": taking(2.0), "fast": taking(fast_s)}
        found = turns(runs, matmuls.RULES, wall_timer(lambda: now[0]), lambda: now[0])
        assert [len(times) for times in found.values()] == [rounds, rounds]


def test_large_operands_repeat_random_numbers() -> None:
    wide = RandomTensor((1024, 2048), (2048, 1), torch.float32).tensor()
    assert wide.unique(dim=0).shape[0] == 1024 and wide.std().sub(1).abs() < 0.01
    assert torch.equal(wide, RandomTensor((1024, 2048), (2048, 1), torch.float32).tensor())
