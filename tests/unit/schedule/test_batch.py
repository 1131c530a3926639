"""Independent loops with one body and different sizes run as one kernel, and which do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from perfuse.errors import SpecError
from perfuse.schedule.plan import Batch, Plan
from perfuse.schedule.verify import verify_plan
from tests.unit.lower.samples import f32
from tests.unit.planning import plans_of


def plan_of(fn: object, *inputs: object) -> Plan:
    (plan,) = plans_of(fn, *inputs)  # type: ignore[arg-type]
    verify_plan(plan)
    return plan


def batches(plan: Plan) -> list[Batch]:
    return [kernel.batch for kernel in plan.kernels if kernel.batch is not None]


def scaled(*tensors: Tensor) -> list[Tensor]:
    return [torch.exp(t) * 2 + 1 for t in tensors]


def test_equal_loops_of_different_sizes_are_one_kernel() -> None:
    plan = plan_of(scaled, *(f32(3 + k, 5) for k in range(6)))
    (batch,) = batches(plan)
    assert len(plan.kernels) == 1
    assert [part.count for part in batch.parts] == [5 * (3 + k) for k in range(6)]
    assert "batch of 6 kernels, 15 to 40 elements" in str(plan)


def test_few_loops_stay_apart_and_it_is_said_why() -> None:
    def fn(*tensors: Tensor) -> list[Tensor]:
        ops = torch.exp, torch.exp, torch.sin, torch.cos, torch.tanh
        return [op(t) + 1 for op, t in zip(ops, tensors, strict=True)]

    plan = plan_of(fn, *(f32(3 + k, 5) for k in range(5)))
    assert not batches(plan) and len(plan.kernels) == 5
    assert any("too few for a batch" in refusal.reason for refusal in plan.refusals)


def test_single_elements_join_the_others() -> None:
    plan = plan_of(scaled, *(f32(k + 1) for k in range(5)))
    (batch,) = batches(plan)
    assert sorted(part.count for part in batch.parts) == [1, 2, 3, 4, 5]


def test_a_size_of_the_call_among_the_values_keeps_loops_apart() -> None:
    def means(x: Tensor) -> list[Tensor]:
        return [(x[0] * k).sum() / x.shape[0] for k in range(2, 8)]

    (plan,) = plans_of(means, f32(3, 5), dynamic=True)
    assert not batches(plan)
    assert batches(plan_of(means, f32(3, 5)))


def test_other_bodies_and_dtypes_stay_apart() -> None:
    def fn(*tensors: Tensor) -> list[Tensor]:
        return [torch.exp(t) + 1 if k % 2 else torch.sin(t) - 3 for k, t in enumerate(tensors)]

    plan = plan_of(fn, *(f32(3 + k, 5) for k in range(8)))
    assert sorted(len(batch.parts) for batch in batches(plan)) == [4, 4]


def test_loops_that_need_each_other_are_batched_level_by_level() -> None:
    def fn(*tensors: Tensor) -> list[Tensor]:
        means = [t.sum() for t in tensors]
        return [t / m for t, m in zip(tensors, means, strict=True)]

    plan = plan_of(fn, *(f32(30 + k, 5) for k in range(5)))
    assert [len(batch.parts) for batch in batches(plan)] == [5, 5]


def test_a_large_temporary_does_not_wait() -> None:
    def fn(*tensors: Tensor) -> list[Tensor]:
        return [torch.softmax(t.t() @ t, -1).sum() for t in tensors]

    plan = plan_of(fn, *(f32(16, 256 + 8 * k) for k in range(5)))
    large = {n for b in batches(plan) for p in b.parts for n in p.buffers}
    sizes = [plan.program.buffers[n] for n in large]
    assert all(b.kind != "temp" or b.num_elements * 4 <= 1 << 16 for b in sizes)  # type: ignore[operator]


def test_large_results_join_a_batch() -> None:
    plan = plan_of(scaled, *(f32(1 << 15, k + 1) for k in range(5)))
    assert len(plan.kernels) == 1 and len(batches(plan)[0].parts) == 5


def test_a_batch_whose_parts_meet_is_refused() -> None:
    plan = plan_of(scaled, *(f32(3 + k, 5) for k in range(6)))
    (kernel,) = plan.kernels
    assert kernel.batch is not None
    first, second, *rest = kernel.batch.parts
    swapped = replace(kernel.batch, parts=(second, first, *rest))
    with pytest.raises(SpecError, match="a part of a batch"):
        verify_plan(replace(plan, steps=(replace(kernel, batch=swapped),)))
