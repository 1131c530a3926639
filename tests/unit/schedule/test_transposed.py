"""Eight-bit results in transposed memory: no scattered bytes, no copies of their own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from perfuse.codegen.triton.unit import generate_triton, tile_of
from perfuse.context import Context
from perfuse.ir.program import Matmul
from perfuse.schedule.plan import Kernel, Plan, Role
from perfuse.schedule.transposed import quantised_axes
from tests.harness.float8 import E4M3
from tests.harness.float8_linear import linear, mlp, mlp_inputs
from tests.unit.planning import gpu_context, plans_of

CPU, SM_90 = Context.default(), gpu_context("sm_90")


def x_bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def both_ways(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    small = (x * scale).clamp(-448, 448).to(E4M3)
    return small, small.t().contiguous()


def both_ways_with_amax(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return *both_ways(x, scale), x.abs().amax()


def normalised(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.softmax(x, -1)
    return y, (y * scale).to(E4M3).t().contiguous()


def tiles(plan: Plan) -> list[str]:
    return [tile_of(kernel, plan, SM_90).kind for kernel in plan.kernels]


@pytest.mark.parametrize("program", [both_ways, both_ways_with_amax])
def test_both_copies_in_one_kernel_with_tiles_of_two_axes(program: object) -> None:
    assert callable(program)
    (plan,) = plans_of(program, x_bf16(96, 64), torch.tensor(0.5), context=SM_90)
    assert tiles(plan) == ["transposed"], str(plan)
    (kernel,) = plan.kernels
    is_persistent = tile_of(kernel, plan, SM_90).programs is not None
    assert is_persistent == any(m.role == Role.ALL for m in kernel.members)


def test_sizes_may_be_known_late() -> None:
    """Without sizes the orders of axes are not compared: the copy is a kernel, of tiles too."""
    given = x_bf16(96, 64), torch.tensor(0.5)
    (plan,) = plans_of(both_ways_with_amax, *given, dynamic=True, context=SM_90)
    assert tiles(plan) == ["flat", "transposed"], str(plan)


def test_rows_do_not_scatter_bytes() -> None:
    given = x_bf16(96, 64), torch.tensor(0.5)
    (plan,) = plans_of(normalised, *given, context=SM_90)
    assert tiles(plan) == ["rows", "transposed"], str(plan)
    (plan,) = plans_of(normalised, *given, context=CPU)
    assert len(plan.kernels) == 1, str(plan)


def test_halves_are_fused_as_before() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.softmax(x, -1)
        return y, y.t().contiguous()

    (plan,) = plans_of(program, x_bf16(96, 64), context=SM_90)
    assert tiles(plan) == ["rows"], str(plan)


def test_a_copy_is_rounded_once() -> None:
    (plan,) = plans_of(both_ways, x_bf16(128, 64), torch.tensor(0.5), context=SM_90)
    text = generate_triton(plan, SM_90).text
    assert text.count(".to(tl.float8e4nv))") == 2, text
    assert "pf_near" not in text and "pf_wide" not in text, text


def scaled_matmuls(plan: Plan) -> list[Matmul]:
    return [step for step in plan.steps if isinstance(step, Matmul) and "scaled_mm" in step.op]


def writers(plan: Plan) -> dict[str, Kernel]:
    return {name: kernel for kernel in plan.kernels for name in kernel.stored}


def assert_no_copies(plan: Plan) -> None:
    """Operands are written by the kernels that quantise, in the layout that the matmul reads."""
    for call in scaled_matmuls(plan):
        first, second = call.args[:2]
        assert first.strides[1] == 1 and second.strides[0] == 1, str(plan)
        for operand in (first, second):
            kernel = writers(plan)[operand.buffer]
            assert any(m.loop.value.op == "round_to" for m in kernel.members), str(plan)
    for kernel in plan.kernels:
        if quantised_axes(kernel.axes, kernel.members):
            assert tile_of(kernel, plan, SM_90).kind == "transposed", str(plan)


def test_kernels_of_a_float8_linear_layer() -> None:
    """For each tensor a maximum, its scale and the quantiser, which stores both copies."""
    x, weight = x_bf16(2, 64, 96).requires_grad_(), x_bf16(128, 96).requires_grad_()
    forward, backward = plans_of(linear, x, weight, context=SM_90)
    assert len(scaled_matmuls(forward)) == 1 and len(scaled_matmuls(backward)) == 2
    assert Counter(tiles(forward)) == {"flat": 6}, str(forward)
    assert Counter(tiles(backward)) == {"flat": 4, "transposed": 3}, str(backward)
    assert_no_copies(forward)
    assert_no_copies(backward)


def test_a_scale_is_computed_once() -> None:
    """The backward flattens the input, and takes the scale that the forward found."""
    x, weight = x_bf16(2, 64, 96).requires_grad_(), x_bf16(128, 96).requires_grad_()
    forward, _ = plans_of(linear, x, weight, context=SM_90)
    assert sum(m.role == Role.ALL for k in forward.kernels for m in k.members) == 2, str(forward)


def test_transposed_weights_wait_until_they_are_needed() -> None:
    """Scales come in a batch, before the first matmul; large operands do not come with them."""
    _, backward = plans_of(mlp, *mlp_inputs(128, 96, 256), context=SM_90)
    is_matmul = [step in scaled_matmuls(backward) for step in backward.steps]
    early = backward.steps[: is_matmul.index(True)]
    assert any(isinstance(step, Kernel) and step.batch is not None for step in early)
    tiled = [s for s in early if isinstance(s, Kernel) and quantised_axes(s.axes, s.members)]
    assert len(tiled) == 2, str(backward)  # the gradient, and the weight that it is multiplied with


def test_kernels_of_a_float8_mlp() -> None:
    forward, backward = plans_of(mlp, *mlp_inputs(128, 96, 256), context=SM_90)
    assert len(scaled_matmuls(forward)) == 3 and len(scaled_matmuls(backward)) == 6
    assert len(forward.kernels) == 13, str(forward)
    assert len(backward.kernels) == 14, str(backward)
    assert_no_copies(forward)
    assert_no_copies(backward)
