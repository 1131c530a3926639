"""Races of plans among selected sources: who may win, what is screened, what is left to ATen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from perfuse.autotune.exactness import error_gate
from perfuse.autotune.faces import AlgorithmSelector
from perfuse.autotune.outcome import Fate, Outcome
from perfuse.autotune.race import Rules
from perfuse.autotune.race_selected import race_selected, require_selected
from perfuse.autotune.screen import screened
from perfuse.context import Context
from perfuse.decision import Choice, Decision, Refusal, library
from perfuse.errors import NoValidChoicesError
from tests.unit.graph.tracing import traced
from tests.unit.planning import plan_of

LIBRARY, TRITON, OTHER = library("aten.mm.out"), Choice("triton", "tile"), Choice("triton", "other")
CHOICES = (LIBRARY, TRITON, OTHER)
RULES = Rules(margin=0.98, fewest_rounds=3, most_rounds=3)
RESULT = torch.randn(4, 4)
MILLISECONDS = {LIBRARY: 2.0, TRITON: 3.0, OTHER: 5.0}


def with_settings(context: Context, **changes: Any) -> Context:
    return replace(context, settings=context.settings.with_overrides(changes))


def raced(
    context: Context, wrong: Sequence[Choice] = (), refused: Sequence[Choice] = ()
) -> Decision:
    """A race under a clock that only the choices move."""
    now = [0.0]

    def enter(choice: Choice) -> Any:
        assert choice not in refused, "what was refused is not run"

        def run() -> torch.Tensor:
            now[0] += 1e-3 * MILLISECONDS[choice]
            return RESULT + (choice in wrong)

        return run

    def timer(run: Any) -> Any:
        start = now[0]
        run()
        seconds = now[0] - start
        return lambda: seconds

    return race_selected(
        "a test",
        CHOICES,
        enter,
        RULES,
        context,
        gate=error_gate(None),
        timer=timer,
        screen=lambda choices: dict.fromkeys(refused, Refusal("crashed: SIGSEGV")),
    )


def test_the_library_wins_where_it_is_faster(context: Context) -> None:
    assert raced(context).chosen == LIBRARY


def test_the_library_cannot_win_where_it_is_not_selected(context: Context) -> None:
    only = with_settings(context, max_autotune_gemm_backends="Triton")
    decision = raced(only)
    assert decision.chosen == TRITON and "ATEN is not selected" in decision.reason
    assert [rival.choice for rival in decision.rivals] == list(CHOICES)


def test_sources_that_are_not_selected_do_not_run(context: Context) -> None:
    aten = with_settings(context, max_autotune_gemm_backends="aten")
    decision = raced(aten)
    assert decision.chosen == LIBRARY
    assert decision.rivals[1].refusal == "its source is not selected"


def test_refused_in_a_worker_is_not_run_here(context: Context) -> None:
    only = with_settings(context, max_autotune_gemm_backends="triton")
    decision = raced(only, refused=[TRITON])
    assert decision.chosen == OTHER and decision.rivals[1].refusal == "crashed: SIGSEGV"


def test_none_valid_is_an_error_or_the_library(context: Context) -> None:
    only = with_settings(context, max_autotune_gemm_backends="triton")
    assert raced(only, wrong=[TRITON], refused=[OTHER]).chosen == LIBRARY
    strict = with_settings(only, autotune_fallback_to_aten=False)
    with pytest.raises(NoValidChoicesError) as raised:
        raced(strict, wrong=[TRITON], refused=[OTHER])
    assert raised.value.reasons == {"tile": "its result differs", "other": "crashed: SIGSEGV"}
    nobody = with_settings(strict, max_autotune_gemm_backends="cpp")
    with pytest.raises(NoValidChoicesError, match="CPP: no candidate"):
        raced(nobody)


def test_infinite_times_are_the_same_error(context: Context) -> None:
    strict = with_settings(context, autotune_fallback_to_aten=False)

    def infinite(self: Any, choices: list[Choice], *_: Any) -> dict[Choice, float]:
        return dict.fromkeys(choices, math.inf)

    with patch.object(AlgorithmSelector, "lookup", infinite), pytest.raises(NoValidChoicesError):
        raced(strict)


def test_matmuls_that_are_left_to_aten_are_reported(context: Context) -> None:
    plan = plan_of(traced(lambda x, y: (x @ y,), torch.ones(4, 4), torch.ones(4, 4)), context)
    lenient = with_settings(context, max_autotune_gemm_backends="triton")
    assert require_selected(plan, lenient) is plan
    assert lenient.counters["autotune.left_to_aten"] == 1
    with pytest.raises(NoValidChoicesError, match="TRITON: not on cpu"):
        require_selected(plan, with_settings(lenient, autotune_fallback_to_aten=False))
    off = with_settings(lenient, autotune_fallback_to_aten=False, max_autotune=False)
    assert require_selected(plan, off) is plan


class FakePool:
    """Answers as told, without a worker."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = outcomes

    def run(self, requests: Sequence[Any], deadline: float) -> Sequence[Outcome]:
        assert len(requests) == len(self.outcomes)
        return self.outcomes


def test_programs_are_screened_in_workers_and_the_dangerous_quarantined(context: Context) -> None:
    settings = with_settings(context, autotune_in_subproc=True)
    plan = plan_of(traced(lambda x: (x + 1,), torch.ones(8)), settings)

    def screen(pool: Any) -> dict[Choice, Refusal]:
        return screened("a problem", CHOICES, lambda _: (plan, plan), settings, pool)

    well, ill = Outcome(Fate.MEASURED, 1.0), Outcome(Fate.CRASHED, detail="SIGSEGV")
    raises = Outcome(Fate.RAISED, detail="RuntimeError: no")
    assert screen(FakePool(well, ill, raises)) == {
        TRITON: Refusal("crashed: SIGSEGV"),
        OTHER: Refusal("raised: RuntimeError: no"),
    }
    again = screen(FakePool(well, well))
    assert again == {TRITON: Refusal("quarantined: crashed: SIGSEGV")}
    off = with_settings(context, autotune_in_subproc=False)
    assert screened("a problem", CHOICES, lambda _: (plan, plan), off) == again
