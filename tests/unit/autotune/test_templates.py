"""Templates raced without a GPU: by Triton's interpreter, under clocks that we set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from perfuse.autotune.exactness import reference_gate
from perfuse.autotune.program_request import random_inputs
from perfuse.autotune.race import Run
from perfuse.autotune.run_alone import identity_of, loaded
from perfuse.autotune.search import Reading
from perfuse.autotune.sites import plan_of_site, sites_of, with_choice
from perfuse.autotune.templates import measured_templates
from perfuse.candidates.triton import template_choices
from perfuse.codegen.triton.templates.template import SOURCE
from perfuse.gpu import gpu_of_name
from perfuse.schedule.plan import Plan
from perfuse.schedule.schedule import place
from perfuse.schedule.verify import verify_plan
from perfuse.testing import fresh_cache
from tests.triton.contractions import context_for
from tests.unit.lower.samples import bf16
from tests.unit.planning import plans_of

GPU = gpu_of_name("sm_90")
A, W, BIAS = bf16(48, 64), bf16(40, 64), bf16(40)


@pytest.fixture(autouse=True)
def own_cache() -> Iterator[None]:
    with fresh_cache():
        yield


def plan_of(fn: Callable[..., Any], *inputs: torch.Tensor) -> Plan:
    (plan,) = plans_of(fn, *inputs, context=context_for("sm_90", interpret=True))
    return plan


def linear_gelu(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(a, w, bias))


class Times:
    """A timer under which the first rival takes a second, and each later one less or more."""

    def __init__(self, step: float) -> None:
        self.step = step
        self.known: dict[int, float] = {}

    def __call__(self, run: Run) -> Reading:
        seconds = self.known.setdefault(id(run), 1.0 + self.step * len(self.known))
        return lambda: seconds


def test_a_faster_template_takes_the_place_of_matmul_and_kernel() -> None:
    context = context_for("sm_90", interpret=True)
    plan = plan_of(linear_gelu, A, W, BIAS)
    assert len(plan.steps) == 2
    made = measured_templates(plan, context, Times(-0.05))
    (decision,) = made.decisions
    assert decision.chosen.source == SOURCE and decision.chosen in made.templates.values()
    assert len(decision.rivals) > 5 and not any(rival.refusal for rival in decision.rivals)
    placed = place(made, context)
    verify_plan(placed)
    (got,) = loaded(placed, context)([A, W, BIAS])
    assert torch.allclose(got.float(), linear_gelu(A, W, BIAS).float(), atol=0.1, rtol=0.02)
    # The decision is remembered, so no clock is asked.
    again = measured_templates(plan, context, Times(1.0))
    assert again.decisions == made.decisions and again.templates == made.templates


def test_dynamic_sizes_are_measured_at_their_likely_values() -> None:
    context = context_for("sm_90", interpret=True)
    (plan,) = plans_of(linear_gelu, A, W, BIAS, dynamic=True, context=context)
    made = measured_templates(plan, context, Times(-0.05))
    (decision,) = made.decisions
    assert decision.chosen.source == SOURCE and not any(r.refusal for r in decision.rivals)
    verify_plan(place(made, context))


def test_the_library_stays_where_templates_are_slower() -> None:
    context = context_for("sm_90", interpret=True)
    plan = plan_of(linear_gelu, A, W, BIAS)
    made = measured_templates(plan, context, Times(0.01))
    assert made.steps == plan.steps and not made.templates
    assert made.decisions[0].chosen.source == "library"


def test_equal_problems_are_measured_once() -> None:
    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = F.relu(x @ w)
        return x

    plan = plan_of(layers, bf16(48, 48), bf16(48, 48))
    sites = list(sites_of(plan))
    assert len(sites) == 3
    assert len({identity_of(plan_of_site(site, plan)) for site in sites}) == 1
    for site in sites:
        choices = template_choices(site, plan.program, GPU, tf32=False)
        plan = with_choice(plan, site, choices[0])
    placed = place(plan, context_for("sm_90"))
    verify_plan(placed)
    assert len(placed.steps) == 3


def test_matmuls_of_one_kernel_are_one_site() -> None:
    def gate(a: torch.Tensor, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return F.silu(a @ g) * (a @ u)

    (site,) = sites_of(plan_of(gate, bf16(48, 64), bf16(64, 40), bf16(64, 40)))
    assert len(site.matmuls) == 2 and site.fused is not None and "with k" in str(site)


def test_a_kernel_is_the_epilogue_of_one_site() -> None:
    def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(a @ b) + (b @ a).t()

    plan = plan_of(both, bf16(48, 48), bf16(48, 48))
    sites = list(sites_of(plan))
    assert [site.epilogue is None for site in sites] == [False, True]
    for site in sites:
        plan = with_choice(plan, site, template_choices(site, plan.program, GPU, tf32=False)[0])
    verify_plan(place(plan, context_for("sm_90")))


def test_a_wrong_result_is_refused() -> None:
    exact = torch.randn(64, 64)
    gate = reference_gate((exact,))
    default = exact + 1e-5 * torch.randn(64, 64)
    assert gate((default,), (default.clone(),)) is None
    wrong = default.clone()
    wrong[3, 4] += 0.1
    for broken in (wrong, default * torch.nan, default + 1e-3 * torch.randn(64, 64)):
        assert gate((default,), (broken,)) is not None


def test_inputs_are_the_same_each_time() -> None:
    program = plan_of(linear_gelu, A, W, BIAS).program
    first, second = (random_inputs(program, torch.device("cpu")) for _ in range(2))
    assert list(first) == list(program.inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("is_left", [False, True])
def test_int8_operands_are_widened_on_their_way_in(is_left: bool) -> None:
    """The kernel that widens them for the library belongs to the library's way, and is raced."""

    def scaled(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        wide = w.to(x.dtype)
        return (wide @ x.t() if is_left else x @ wide.t()) * s

    weight = (torch.arange(40 * 64) % 251 - 120).view(40, 64).to(torch.int8)
    inputs = (A, weight, bf16(48) if is_left else BIAS)
    context = context_for("sm_90", interpret=True)
    plan = plan_of(scaled, *inputs)
    (site,) = sites_of(plan)
    assert len(plan.steps) == 3 and len(site.widening) == 1
    made = measured_templates(plan, context, Times(-0.05))
    (decision,) = made.decisions
    assert decision.chosen.source == SOURCE and not any(r.refusal for r in decision.rivals)
    assert {k.name for k in site.widening} & {k.name for k in made.kernels} == set()
    placed = place(made, context)
    verify_plan(placed)
    (got,) = loaded(placed, context)(list(inputs))
    expected = scaled(*(t.double() for t in inputs))
    assert torch.allclose(got.double(), expected, atol=1.0, rtol=0.02)
