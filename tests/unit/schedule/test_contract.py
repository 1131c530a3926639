"""Matmuls as kernels: which take in the kernel that reads them, which do not, and what is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.config import Settings
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.errors import SpecError
from perfuse.gpu import gpu_of_name
from perfuse.ir.program import BufferKind, Matmul
from perfuse.report.roofline import kernel_flops
from perfuse.schedule.contract import contracted, contracted_with, place_of, with_contraction
from perfuse.schedule.plan import Kernel, Plan
from perfuse.schedule.schedule import place
from perfuse.schedule.verify import verify_plan
from perfuse.target import gpu_target
from tests.unit.lower.samples import bf16, f32
from tests.unit.planning import plans_of

SETTINGS = Settings()
GPU = Context(gpu_target(SETTINGS, gpu_of_name("sm_90")), SETTINGS, Counters())
M, N, K = 96, 80, 64
A, B, R = bf16(M, K), bf16(K, N), bf16(M, N)
BIAS, W = bf16(N), bf16(N, K)
BATCH_A, BATCH_B = bf16(3, M, K), bf16(3, K, N)


def plan_of(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> Plan:
    (plan,) = plans_of(fn, *inputs, dynamic=dynamic, context=GPU)
    return plan


def matmuls_of(plan: Plan) -> list[Matmul]:
    return [step for step in plan.steps if isinstance(step, Matmul)]


def fused(plan: Plan) -> Kernel | str:
    """All matmuls of a plan with its last kernel."""
    return contracted_with(matmuls_of(plan), plan.kernels[-1], plan)


def replanned(plan: Plan, kernel: Kernel | str) -> Plan:
    """The plan with the kernel in it, held to its spec."""
    assert isinstance(kernel, Kernel), kernel
    made = place(with_contraction(plan, kernel), GPU)
    verify_plan(made)
    return made


# A function of these inputs, and the results that its one kernel stores.
FUSED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int]] = {
    "relu": (lambda a, b: F.relu(a @ b), (A, B), 1),
    "bias of the library": (lambda a, w, c: F.gelu(F.linear(a, w, c)), (A, W, BIAS), 1),
    "bias of a loop": (lambda a, b, c: (a @ b + c).sigmoid(), (f32(M, K), f32(K, N), f32(N)), 1),
    "residual": (lambda a, b, r: r + 2 * (a @ b), (A, B, R), 1),
    "cast": (lambda a, b: (a @ b).float(), (A, B), 1),
    "two results": (lambda a, b: ((y := a @ b).relu(), y.exp()), (A, B), 2),
    "the product too": (lambda a, b: ((y := a @ b), y.relu()), (A, B), 2),
    "read later": (lambda a, b, w: (y := a @ b).relu() @ y[:N].mT, (A, B, W), 2),
    "three dimensions": (lambda a, w, c: F.gelu(F.linear(a, w, c)), (bf16(4, 24, K), W, BIAS), 1),
    "a row's scale": (lambda a, b, s: (a @ b) * s[:, None], (A, B, bf16(M)), 1),
    "batch": (lambda a, b: F.relu(torch.bmm(a, b)), (BATCH_A, BATCH_B), 1),
    "heads": (
        lambda a, w: F.linear(a, w).view(4, 24, 8, 10).transpose(1, 2).contiguous() * 2,
        (bf16(4, 24, K), W),
        1,
    ),
    "sum of two": (lambda a, b, c, d: a @ b + c @ d, (A, B, bf16(M, 32), bf16(32, N)), 1),
    "gate and up": (lambda a, g, u: F.silu(a @ g) * (a @ u), (A, B, bf16(K, N)), 1),
}


@pytest.mark.parametrize("name", FUSED)
def test_the_kernel_that_reads_a_matmul_is_its_epilogue(name: str) -> None:
    fn, inputs, num_stored = FUSED[name]
    plan = plan_of(fn, *inputs)
    first = [m for m in matmuls_of(plan) if m.out in plan.kernels[-1].reads()]
    made = replanned(plan, contracted_with(first, plan.kernels[-1], plan))
    (kernel,) = made.kernels
    assert kernel.contraction is not None and kernel.contraction.matmuls == tuple(first)
    assert len(kernel.stored) == num_stored
    assert len(made.steps) == len(plan.steps) - len(first)
    assert kernel.num_flops > 2 * M * N * 32 and "matmul: " in str(made)
    # Operands are read; results that stay in the kernel have no memory.
    assert set(kernel.contraction.reads()) <= set(kernel.reads())
    inside = set(kernel.contraction.outs) - kernel.stored
    assert not inside & {a.name for a in made.memory.allocations()}


APART: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "transposed reads": (lambda a, b: (y := a @ b) + y.mT, (bf16(M, K), bf16(K, M)), "elements"),
    "a softmax": (lambda a, b: torch.softmax(a @ b, -1), (A, B), "element by element"),
    "overwrites an operand": (lambda a, b: a.copy_(a @ b), (bf16(M, M), bf16(M, M)), "operand"),
    "updated in place": (
        lambda a, b: (a @ b).index_put((torch.arange(3),), torch.ones(())).relu(),
        (f32(M, K), f32(K, N)),
        "updated in place",
    ),
    "read before": (lambda a, b: (y := a @ b).sum() + y.relu() * 2, (A, B), "read before"),
}


@pytest.mark.parametrize("name", APART)
def test_others_stay_apart_and_it_is_said_why(name: str) -> None:
    fn, inputs, reason = APART[name]
    plan = plan_of(fn, *inputs)
    made = fused(plan)
    assert isinstance(made, str) and reason in made, f"{made}\n{plan}"


def test_what_is_overwritten_in_between_is_not_multiplied_later() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        product = a @ b
        a.mul_(2)
        return torch.softmax(a, -1).sum() + product

    plan = plan_of(fn, A.clone(), B)
    reasons = [contracted_with(matmuls_of(plan), k, plan) for k in plan.kernels]
    assert all(isinstance(reason, str) for reason in reasons), plan


@pytest.mark.parametrize("shape", [(M, N, K), (0, N, K), (M, N, 0), (1, N, K)])
def test_alone(shape: tuple[int, int, int]) -> None:
    rows, columns, depth = shape
    plan = plan_of(lambda a, b: torch.mm(a, b), bf16(rows, depth), bf16(depth, columns))
    (matmul,) = matmuls_of(plan)
    made = replanned(plan, contracted(matmul, plan.program))
    (kernel,) = made.kernels
    assert kernel.stored == {matmul.out} and not kernel.members
    assert kernel.num_flops == 2 * rows * columns * depth
    moved = 2 * (rows * depth + depth * columns + rows * columns)
    assert kernel.num_bytes == moved


def test_the_memory_of_a_library_becomes_a_temporary() -> None:
    plan = plan_of(lambda a, w, c: F.linear(a, w, c).relu() @ w, A, W, BIAS)
    matmul = matmuls_of(plan)[0]
    assert plan.program.buffers[matmul.out].kind is BufferKind.EXTERN
    made = replanned(plan, contracted(matmul, plan.program))
    assert made.program.buffers[matmul.out].kind is BufferKind.TEMP
    assert matmul.out in {a.name for a in made.memory.allocations()}


def test_dynamic_sizes() -> None:
    plan = plan_of(lambda a, b: F.relu(a @ b), A, B, dynamic=True)
    (kernel,) = replanned(plan, fused(plan)).kernels
    assert kernel.num_flops == 0
    assert kernel_flops(kernel, plan.program.hints) > 2 * M * N * K


def test_positions_are_those_of_the_matrices() -> None:
    fn, inputs, _ = FUSED["heads"]
    plan = plan_of(fn, *inputs)
    kernel = fused(plan)
    assert isinstance(kernel, Kernel)
    row, column = place_of(kernel)
    assert repr(row) == "24*x0 + x1" and repr(column) == "10*x2 + x3"
    assert [axis.reduced for axis in kernel.axes] == [False, False, True, True]


def test_the_spec_refuses_what_is_broken() -> None:
    plan = plan_of(lambda a, b: F.relu(a @ b), A, B)
    good = fused(plan)
    assert isinstance(good, Kernel) and good.contraction is not None
    narrow = replace(good, axes=tuple(replace(a, reduced=False) for a in good.axes))
    stores = replace(good, stored=good.stored | {good.contraction.reads()[0]})
    for broken, reason in ((narrow, "not of the size"), (stores, "an operand is overwritten")):
        with pytest.raises(SpecError, match=reason):
            verify_plan(place(with_contraction(plan, broken), GPU))
    made = with_contraction(plan, good)
    twice = replace(made, steps=(*matmuls_of(plan), *made.steps))
    with pytest.raises(SpecError, match="runs twice"):
        verify_plan(place(twice, GPU))
