"""C++ templates raced against the library: what is raced, remembered, refused, and left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.autotune import contractions
from perfuse.autotune.contractions import (
    contraction_of,
    decide,
    measured,
    question_of,
    tune_contractions,
)
from perfuse.autotune.matmuls import tune_matmuls
from perfuse.autotune.race_plans import PlanRace
from perfuse.codegen.cpp.templates.choices import SOURCE, CppTemplate
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.decision import Decision, Rival, library
from perfuse.ir.matmul import LINEAR
from perfuse.ir.program import BufferKind, Matmul
from perfuse.pipeline import compile_graph
from perfuse.schedule.plan import Plan
from perfuse.schedule.schedule import place
from perfuse.schedule.verify import verify_plan
from perfuse.testing import fresh_cache
from tests.harness.compare import assert_as_good_as_eager
from tests.unit.graph.tracing import traced
from tests.unit.lower.samples import f32
from tests.unit.planning import plan_of

X, W, BIAS = f32(40, 96), f32(64, 96), f32(64)


def activated(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.sigmoid(F.linear(x, w, bias))


@pytest.fixture
def context() -> Iterator[Context]:
    """Tuning on for matmuls of any size, an empty cache, counters of its own."""
    changes = {"max_autotune": True, "thresholds.tuned_matmul_work": 1, "cpu.opt_level": 1}
    with fresh_cache():
        default = Context.default()
        settings = default.settings.with_overrides(changes)
        yield replace(default, settings=settings, counters=Counters())


def planned(fn: Callable[..., Any], *inputs: Tensor) -> Plan:
    return plan_of(traced(fn, *inputs))


def matmul_of(plan: Plan) -> Matmul:
    return next(step for step in plan.steps if isinstance(step, Matmul))


def chosen_last(raced: PlanRace, *_: Any) -> Decision:
    rivals = tuple(Rival(choice, 1.0, 1.0, 0.0) for choice in raced.choices)
    return Decision(raced.subject, raced.choices[-1], rivals, "a test")


def test_templates_race_the_library_with_the_epilogue(context: Context) -> None:
    plan = planned(activated, X, W, BIAS)
    found = contraction_of(matmul_of(plan), plan, context)
    assert found is not None
    assert found.choices[0].source == "library" and len(found.steps) == 2
    assert {choice.source for choice in found.choices[1:]} == {"library", "cpp"}
    decision = measured(found, question_of(found, context), context)
    assert not any(rival.refusal for rival in decision.rivals), str(decision)


def test_decision_is_remembered(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(activated, X, W, BIAS)
    found = contraction_of(matmul_of(plan), plan, context)
    assert found is not None
    monkeypatch.setattr(contractions, "race_plans", chosen_last)
    first = decide(found, context)
    monkeypatch.setattr(contractions, "race_plans", None)  # to measure again would fail
    assert decide(found, context) == first
    counts = context.counters.snapshot()
    assert counts["autotune.contractions_measured"] == counts["autotune.cache_hit"] == 1


def test_chosen_template_computes_the_program(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contractions, "race_plans", chosen_last)
    compiled = compile_graph(traced(activated, X, W, BIAS), context)
    (kernel,) = compiled.plan.kernels
    assert kernel.contraction is not None and not compiled.plan.steps[1:]
    assert any("templates/gemm.h" in text for text in compiled.texts())
    (got,) = compiled.call([X, W, BIAS])
    assert_as_good_as_eager(
        got, activated(X, W, BIAS), activated(*(t.double() for t in (X, W, BIAS)))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_are_read_as_they_are(
    context: Context, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The kernel that would widen them is gone, and the race includes it on the library's side."""

    def scaled(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return (x @ w.to(x.dtype).t()) * s

    weight = torch.arange(64 * 96).view(64, 96).to(torch.int8)
    inputs = (X.to(dtype), weight, BIAS.to(dtype))
    plan = planned(scaled, *inputs)
    found = contraction_of(matmul_of(plan), plan, context)
    assert found is not None and len(found.steps) == 3
    decision = measured(found, question_of(found, context), context)
    assert not any(rival.refusal for rival in decision.rivals), str(decision)
    monkeypatch.setattr(contractions, "race_plans", chosen_last)
    compiled = compile_graph(traced(scaled, *inputs), context)
    assert len(compiled.plan.steps) == 1
    (got,) = compiled.call(list(inputs))
    wide = (inputs[0].double(), weight, inputs[2].double())
    assert_as_good_as_eager(got, scaled(*inputs), scaled(*wide))


@pytest.mark.parametrize("weight", [W, W.to(torch.int8)], ids=["f32", "int8"])
def test_a_matmul_of_another_library_is_replaced_too(
    context: Context, monkeypatch: pytest.MonkeyPatch, weight: Tensor
) -> None:
    """oneDNN returns memory of its own; a generated kernel stores into the program's."""
    plan = planned(lambda x, w: x @ w.to(x.dtype).mT, X, weight)
    matmul = matmul_of(plan)
    other = replace(matmul, choice=library(LINEAR))
    buffers = dict(plan.program.buffers)
    buffers[matmul.out] = replace(buffers[matmul.out], kind=BufferKind.EXTERN)
    program = replace(
        plan.program,
        buffers=buffers,
        nodes=tuple(other if node is matmul else node for node in plan.program.nodes),
    )
    steps = tuple(other if step is matmul else step for step in plan.steps)
    changed = replace(plan, program=program, steps=steps)
    monkeypatch.setattr(contractions, "race_plans", chosen_last)
    tuned, _ = tune_contractions(changed, context)
    assert tuned.program.buffers[matmul.out].kind is BufferKind.TEMP and len(tuned.steps) == 1
    verify_plan(place(tuned, context))


@pytest.mark.parametrize(
    "changes", [{"max_autotune": False}, {"thresholds.tuned_matmul_work": 1 << 30}]
)
def test_left_alone(context: Context, changes: dict[str, Any]) -> None:
    plan = planned(activated, X, W, BIAS)
    untuned = replace(context, settings=context.settings.with_overrides(changes))
    tuned, _ = tune_contractions(plan, untuned)
    assert (tuned.steps, tuned.decisions) == (plan.steps, ())


def test_equal_layers_share_a_decision(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    raced: list[str] = []

    def race(rivals: PlanRace, *_: Any) -> Decision:
        raced.append(rivals.subject)
        return chosen_last(rivals)

    def layers(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        for weight in (v, w):
            x = torch.relu(x @ weight + 1)
        return x

    monkeypatch.setattr(contractions, "race_plans", race)
    plan = planned(layers, f32(40, 96), f32(96, 96), f32(96, 96))
    tuned, _ = tune_contractions(plan, context)
    assert raced == ["matmul 40x96x96 with 1 loops"]
    assert len(tuned.templates) == 2 and len(tuned.decisions) == 1
    verify_plan(place(tuned, context))


def test_one_question_has_libraries_and_templates(context: Context) -> None:
    plan = planned(activated, X, W, BIAS)
    tuned = tune_matmuls(plan, context)
    (decision,) = tuned.decisions
    assert [rival.choice.source for rival in decision.rivals][:3] == ["library", "library", "cpp"]
    assert context.counters["autotune.contractions_measured"] == 1
    assert context.counters["autotune.matmuls_measured"] == 0
    again = tune_matmuls(plan, context)
    assert again.decisions == tuned.decisions and again.steps == tuned.steps


def test_another_library_may_win_the_question(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(raced: PlanRace, *_: Any) -> Decision:
        return replace(chosen_last(raced), chosen=raced.choices[1])

    monkeypatch.setattr(contractions, "race_plans", second)
    tuned = tune_matmuls(planned(activated, X, W, BIAS), context)
    matmul = matmul_of(tuned)
    assert matmul.choice == library(LINEAR) and not tuned.templates
    assert tuned.program.buffers[matmul.out].kind is BufferKind.EXTERN
    verify_plan(place(tuned, context))


@pytest.mark.parametrize("in_workers", [False, True])
def test_a_template_that_writes_out_of_bounds_is_quarantined(
    context: Context, monkeypatch: pytest.MonkeyPatch, in_workers: bool
) -> None:
    """The value is right, and three elements behind the result another one is stored."""
    changed = context.settings.with_overrides({"autotune_in_subproc": in_workers})
    context = replace(context, settings=changed)
    plan = planned(activated, X, W, BIAS)
    found = contraction_of(matmul_of(plan), plan, context)
    assert found is not None
    stray = next(choice.name for choice in found.choices if choice.source == SOURCE)
    right = CppTemplate.function.fget  # type: ignore[attr-defined]

    def function(template: CppTemplate) -> str:
        store = f"a3[{X.shape[0] * W.shape[0]} + 3] = 7.0f; " if str(template) == stray else ""
        return store + right(template)

    monkeypatch.setattr(CppTemplate, "function", property(function))
    decision = decide(found, context)
    refused = {rival.choice.name: rival.refusal for rival in decision.rivals if rival.refusal}
    assert list(refused) == [stray]
    assert "wrong result" in refused[stray]
    assert "wrote out of bounds, 12 bytes after the end of" in refused[stray]
    assert context.counters["autotune.quarantined"] == 1
