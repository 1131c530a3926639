"""Matmuls raced between libraries: what is remembered, replaced, shown, and left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import perfuse
from perfuse.autotune import matmuls
from perfuse.autotune.matmuls import (
    CpuMatmul,
    choices_of,
    decide,
    entered,
    question_of,
    tune_matmuls,
)
from perfuse.autotune.race import race
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.decision import Decision, Rival, library
from perfuse.graph_cache import load_or_compile
from perfuse.ir.matmul import LINEAR, RIVALS, RivalCall
from perfuse.ir.program import LibraryCall
from perfuse.runtime import changing_linear
from perfuse.schedule.plan import Plan
from perfuse.testing import fresh_cache
from tests.harness.compare import assert_as_good_as_eager
from tests.unit.graph.tracing import traced
from tests.unit.lower.samples import f32
from tests.unit.planning import plan_of

PROBLEM = CpuMatmul(64, 256, 256, (256, 1), (256, 1), has_bias=False)
LARGE = (f32(64, 256), f32(256, 256))


def chosen(op: str) -> Decision:
    rivals = tuple(Rival(choice, 1.0, 1.0, 0.0) for choice in choices_of(PROBLEM))
    return Decision("a test", library(op), rivals, "a test")


@pytest.fixture
def context() -> Iterator[Context]:
    """A context with an empty cache and counters of its own."""
    with fresh_cache():
        yield replace(Context.default(), counters=Counters())


def test_decision_is_remembered(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    first = decide(PROBLEM, context)
    monkeypatch.setattr(matmuls, "race", None)  # to measure again would fail
    assert decide(PROBLEM, context) == first
    counts = context.counters.snapshot()
    assert counts["autotune.matmuls_measured"] == counts["autotune.cache_hit"] == 1


def test_other_matmuls_are_measured_on_their_own(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmuls, "race", lambda *_, **__: chosen("aten.mm.out"))
    for other in (PROBLEM, replace(PROBLEM, rows=32), replace(PROBLEM, b_strides=(1, 256))):
        decide(other, context)
    assert context.counters.snapshot()["autotune.matmuls_measured"] == 3


@pytest.mark.parametrize("has_bias", [False, True])
def test_candidates_agree(has_bias: bool) -> None:
    strided = replace(PROBLEM, a_strides=(300, 1), b_strides=(1, 256), has_bias=has_bias)
    enter = entered(strided, tuple(operand.tensor() for operand in strided.operands()))
    ours, linear = (enter(choice)().clone() for choice in choices_of(strided))
    # Each sums 256 products in an order of its own.
    limit = 2 * 256 * torch.finfo(torch.float32).eps * float(ours.abs().max())
    assert float((ours - linear).abs().max()) <= limit


@pytest.mark.skipif(not RIVALS[0].is_available(), reason="one library only")
def test_a_library_without_a_kernel_for_gaps_takes_no_part() -> None:
    """oneDNN computes a weight with gaps element by element, a thousand times as slowly."""
    dense = ((256, 1), (1, 256))
    for strides in (*dense, (1, 300), (300, 1), (512, 2), (2, 512)):
        names = [choice.name for choice in choices_of(replace(PROBLEM, b_strides=strides))]
        assert (LINEAR in names) == (strides in dense), strides
    column = CpuMatmul(64, 1, 256, (256, 1), (1, 7), has_bias=False)
    assert LINEAR in [choice.name for choice in choices_of(column)], "a single column has no gaps"


def test_random_state_is_untouched(context: Context) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    decide(PROBLEM, context)
    assert torch.equal(torch.get_rng_state(), before)


def plan_for(fn: Callable[..., Any], *inputs: torch.Tensor) -> Plan:
    """A plan in which nothing was tuned yet."""
    with perfuse.config.patch({"cpu.tune_matmuls": False}):
        return plan_of(traced(fn, *inputs), Context.default())


def calls(plan: Plan) -> list[str]:
    steps = [step.op for step in plan.steps if isinstance(step, LibraryCall)]
    assert steps == [node.op for node in plan.program.nodes if isinstance(node, LibraryCall)]
    return steps


def test_winner_replaces_the_call(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmuls, "decide", lambda *_: chosen(LINEAR))
    plan = plan_for(torch.mm, *LARGE)
    tuned = tune_matmuls(plan, context)
    assert calls(plan) == ["aten.mm.out"] and calls(tuned) == [LINEAR]
    assert tuned.decisions == (chosen(LINEAR),)


@pytest.mark.skipif(not RIVALS[0].is_available(), reason="one library only")
def test_sizes_that_change_are_not_all_of_one_library(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN keeps code for each combination of sizes: it gets some of them, and keeps those."""
    monkeypatch.setattr(matmuls, "race", lambda *_, **__: chosen(LINEAR))
    monkeypatch.setattr(changing_linear, "_sizes_of_onednn", set[Any]())
    monkeypatch.setattr(changing_linear, "_num_of_a_layer", Counter[Any]())
    torch._dynamo.reset()
    layer = torch.compile(F.linear, backend="perfuse", dynamic=True)
    x, w, b = f32(300, 256), f32(256, 256), f32(256)
    exact = F.linear(x.double(), w.double(), b.double())
    for num_rows in [*range(200, 230), *range(200, 230)]:
        got = layer(x[:num_rows], w, b)
        assert_as_good_as_eager(got, F.linear(x[:num_rows], w, b), exact[:num_rows])
    assert len(changing_linear._sizes_of_onednn) == changing_linear.MOST_OF_A_LAYER


def test_default_that_wins_stays(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmuls, "decide", lambda *_: chosen("aten.mm.out"))
    plan = plan_for(torch.mm, *LARGE)
    tuned = tune_matmuls(plan, context)
    assert calls(tuned) == ["aten.mm.out"] and tuned.program == plan.program
    assert tuned.decisions == (chosen("aten.mm.out"),)


TOY = RivalCall("aten.linear.default", lambda x: (x.a, x.b.T, x.bias))


@pytest.fixture
def toy_wins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rival from outside, which takes part in races and wins whatever the clock says."""

    def won(*args: Any, **rest: Any) -> Decision:
        decision = race(*args, **rest)
        assert decision.rivals[-1].choice == library(TOY.op) and not decision.rivals[-1].refusal
        return replace(decision, chosen=library(TOY.op))

    monkeypatch.setattr(matmuls, "race", won)
    RIVALS.append(TOY)
    yield
    RIVALS.remove(TOY)


@pytest.mark.parametrize("fn", [F.linear, lambda x, w, b: F.linear(x, w).relu() + b])
@pytest.mark.usefixtures("context", "toy_wins")
def test_a_row_adds_a_rival(fn: Callable[..., torch.Tensor]) -> None:
    inputs = (f32(64, 256), f32(256, 256), f32(256))
    (graph,) = perfuse.explain(fn, *inputs).graphs
    assert [(call.op, call.kind) for call in graph.calls] == [(TOY.op, "matmul")]
    torch._dynamo.reset()
    got = torch.compile(fn, backend="perfuse")(*inputs)
    assert_as_good_as_eager(got, fn(*inputs), fn(*(x.double() for x in inputs)))


def test_setting_leaves_the_plan_alone(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmuls, "decide", None)
    settings = context.settings.with_overrides({"cpu.tune_matmuls": False})
    plan = plan_for(torch.mm, *LARGE)
    assert tune_matmuls(plan, replace(context, settings=settings)) is plan


UNTOUCHED = [
    ("small", (f32(8, 8), f32(8, 8))),
    ("double", tuple(x.double() for x in LARGE)),
    ("bf16", tuple(x.bfloat16() for x in LARGE)),
]


@pytest.mark.parametrize("row", UNTOUCHED, ids=lambda row: row[0])
def test_no_race_for(
    row: tuple[str, tuple[torch.Tensor, ...]], context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmuls, "decide", None)
    plan = plan_for(torch.mm, *row[1])
    assert tune_matmuls(plan, context).steps == plan.steps


def test_decisions_travel_with_the_program(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmuls, "race", lambda *_, **__: chosen("aten.mm.out"))
    graph = traced(lambda x, y: (x @ y,), *LARGE)
    made = load_or_compile(graph, context)
    found = load_or_compile(graph, context)
    assert context.counters["graph.cache_hit"] == 1
    (decision,) = made.decisions
    assert made.decisions == found.decisions and decision.chosen == library("aten.mm.out")
    assert decision.question == question_of(PROBLEM, choices_of(PROBLEM), context)


def test_an_explanation_shows_decisions(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmuls, "race", lambda *_, **__: chosen(LINEAR))
    explained = perfuse.explain(torch.mm, *LARGE)
    assert 'Measured: 1 choice, 1 other than the default; .stage("decisions")' in str(explained)
    assert f"chosen  {LINEAR}" in explained.stage("decisions")
    assert "Measured" not in str(perfuse.explain(torch.mm, f32(8, 8), f32(8, 8)))


def test_sizes_that_calls_decide_are_raced_by_their_hints(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[matmuls.CpuMatmul] = []

    def linear_wins(problem: matmuls.CpuMatmul, *_: Any) -> Decision:
        asked.append(problem)
        return chosen(LINEAR)

    monkeypatch.setattr(matmuls, "decide", linear_wins)
    weight, bias = torch.randn(300, 256), torch.randn(300)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias).relu()

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="perfuse", dynamic=True)
    with fresh_cache():
        for rows in (64, 3, 500):
            x = torch.randn(rows, 256)
            exact = F.linear(x.double(), weight.double(), bias.double()).relu()
            assert_as_good_as_eager(compiled(x), fn(x), exact)
    assert [(p.rows, p.depth, p.columns) for p in asked] == [(64, 256, 300)]


def test_sizes_by_formulas_are_not_raced(context: Context) -> None:
    """Nothing says how large a formula is; with a guess, this size would be negative."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        rest = x[max(x.shape[0] // 2, 300) :]
        return rest @ rest.t()

    torch._dynamo.reset()
    x = torch.randn(1000, 256)
    with fresh_cache():
        got = torch.compile(fn, backend="perfuse", dynamic=True)(x)
    assert_as_good_as_eager(got, fn(x), fn(x.double()))
