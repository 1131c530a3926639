"""Templates that default mode takes without measuring, where they are known to win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from perfuse.autotune.device_kind import device_kind
from perfuse.autotune.known_choices import KNOWN
from perfuse.autotune.templates import tune_templates
from perfuse.codegen.triton.templates.template import Template
from perfuse.context import Context
from perfuse.ir.program import Matmul
from perfuse.schedule.plan import Plan
from perfuse.schedule.schedule import place
from perfuse.schedule.verify import verify_plan
from tests.triton.contractions import context_for
from tests.unit.planning import plans_of

BF16, F32 = torch.bfloat16, torch.float32
CONTEXT = context_for("sm_90")


def sum_of_two(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return a @ b + c @ d


def by_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


def tuned(
    fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype, context: Context = CONTEXT
) -> Plan:
    """The plan for tensors without memory, after the tuner of templates."""
    with torch.no_grad(), FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
        (plan,) = plans_of(fn, *inputs, context=context)
    return tune_templates(plan, context)


def has_matmul(plan: Plan) -> bool:
    return any(isinstance(step, Matmul) for step in plan.steps)


def test_one_row_by_a_matrix_in_rows_of_the_depth() -> None:
    plan = tuned(by_rows, (1, 14336), (4096, 14336), dtype=BF16)
    (choice,) = plan.templates.values()
    assert Template.of(choice) == KNOWN[0].template and not has_matmul(plan)
    (decision,) = plan.decisions
    assert decision.chosen == choice and "1.06 times" in decision.reason
    verify_plan(place(plan, CONTEXT))


def test_a_sum_of_two_matmuls_is_one_kernel() -> None:
    shapes = ((2048, 64), (64, 1536), (2048, 64), (64, 1536))
    plan = tuned(sum_of_two, *shapes, dtype=F32)
    (choice,) = plan.templates.values()
    assert Template.of(choice).precision == "bf16x6" and len(plan.steps) == 1
    verify_plan(place(plan, CONTEXT))
    off = CONTEXT.settings.with_overrides({"gpu.known_templates": False})
    left = tuned(sum_of_two, *shapes, dtype=F32, context=replace(CONTEXT, settings=off))
    assert has_matmul(left) and not left.decisions


@pytest.mark.parametrize(
    ("fn", "shapes", "dtype"),
    [
        (torch.mm, ((1, 14336), (14336, 4096)), BF16),
        (by_rows, ((1, 1024), (4096, 1024)), BF16),
        (by_rows, ((2, 14336), (4096, 14336)), BF16),
        (by_rows, ((1, 14336), (4096, 14336)), F32),
        (sum_of_two, ((2048, 256), (256, 1536)) * 2, F32),
        (sum_of_two, ((256, 64), (64, 256)) * 2, F32),
        (sum_of_two, ((2048, 64), (64, 1536)) * 2, BF16),
    ],
)
def test_other_matmuls_stay_with_the_library(fn: Any, shapes: Any, dtype: torch.dtype) -> None:
    plan = tuned(fn, *shapes, dtype=dtype)
    assert has_matmul(plan) and not plan.templates and not plan.decisions


def test_another_gpu_has_no_known_choices() -> None:
    other = context_for("gfx942")
    assert device_kind(other.target) not in {row.device for row in KNOWN}
    assert has_matmul(tuned(by_rows, (1, 14336), (4096, 14336), dtype=BF16, context=other))
