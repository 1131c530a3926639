"""Temporaries of rounded values lie in memory as what they were rounded to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.ir.dtype import DType
from perfuse.schedule.plan import Plan
from tests.unit.planning import plans_of


def _widened_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]).float()


def _bounded(x: Tensor) -> Tensor:
    """The norm passes through memory, because all of it has to be seen first."""
    y = _widened_norm(x)
    return torch.where(y.abs().amax() < 100, y, 0.0)


def _wide_stores(plan: Plan) -> set[DType]:
    buffers = plan.program.buffers
    stored = [buffers[n] for k in plan.kernels for n in k.stored]
    return {b.dtype for b in stored if b.shape == (64, 32)}


def test_a_widened_half_passes_between_kernels_as_a_half() -> None:
    (plan,) = plans_of(_bounded, torch.randn(64, 32).half())
    assert _wide_stores(plan) == {DType.F16, DType.F32}
    assert DType.F16 in {plan.program.buffers[n].dtype for n in plan.kernels[-1].reads()}


def test_what_leaves_the_program_keeps_its_type() -> None:
    (plan,) = plans_of(_widened_norm, torch.randn(64, 32).half())
    assert _wide_stores(plan) == {DType.F32}


def test_what_a_library_reads_keeps_its_type() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(_widened_norm(x), w)

    (plan,) = plans_of(fn, torch.randn(64, 32).half(), torch.randn(32, 16))
    assert _wide_stores(plan) == {DType.F32}


def test_results_of_a_call_that_are_no_buffers_are_left_alone() -> None:
    x = torch.randn(4, 8)
    got = torch.compile(lambda t: torch.fft.fft(t + 1), backend="perfuse")(x)
    torch.testing.assert_close(got, torch.fft.fft(x + 1))


def test_the_values_are_rounded_once() -> None:
    x = torch.randn(64, 32).half()
    got, exact = torch.compile(_bounded, backend="perfuse")(x), _widened_norm(x.double()).double()
    assert torch.equal(got, got.half().float())
    spacing = 2.0 ** (torch.floor(torch.log2(exact.abs())) - 10).clamp(min=-24)
    assert ((got - exact).abs() <= 0.501 * spacing).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [3, 70])
def test_all_sweeps_read_what_is_stored(width: int, dtype: torch.dtype) -> None:
    """A mean of values before their rounding would not be the mean of rows nearly constant."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x / (x.abs() + 1)
        return F.layer_norm(y, y.shape[-1:]), y

    torch.manual_seed(0)
    x = torch.rand(64, 1) * 4 + torch.tensor([1.0, 1.0, 1.02]).repeat(width)[:width]
    norms, values = torch.compile(fn, backend="perfuse")(x.to(dtype))
    exact = F.layer_norm(values.double(), values.shape[-1:])
    spacing = torch.finfo(dtype).eps * exact.abs().clamp(min=torch.finfo(dtype).tiny)
    narrow = 4 * torch.finfo(torch.float32).eps / 1e-5**0.5  # deviations are scaled by up to this
    assert ((norms.double() - exact).abs() <= spacing + narrow).all()
