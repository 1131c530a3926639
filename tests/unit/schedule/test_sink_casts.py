"""Reductions that are only converted or copied write where the copy goes."""

from __future__ import annotations

import torch
from torch import Tensor

from perfuse.schedule.plan import Plan
from tests.unit.planning import plans_of


def _loops(plan: Plan) -> int:
    return sum(len(kernel.members) for kernel in plan.kernels)


def _plan(fn: object, *inputs: Tensor) -> Plan:
    return plans_of(fn, *inputs)[0]  # type: ignore[arg-type]


def test_a_sum_that_is_rounded_once_is_stored_rounded() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.float().sum(0).to(torch.bfloat16)

    plan = _plan(fn, torch.randn(64, 32).to(torch.bfloat16))
    assert _loops(plan) == 1
    (kernel,) = plan.kernels
    assert str(plan.program.buffers[kernel.members[0].loop.out].dtype) == "bf16"


def test_an_amax_fills_the_callers_buffer() -> None:
    def fn(x: Tensor, buffer: Tensor) -> Tensor:
        buffer.fill_(x.abs().amax())
        return x * 2

    plan = _plan(fn, torch.randn(64, 32), torch.zeros(1))
    assert len(plan.kernels) == 1


def test_a_result_that_is_also_wanted_unrounded_stays() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.float().sum(0)
        return total, total.to(torch.bfloat16)

    assert _loops(_plan(fn, torch.randn(64, 32).to(torch.bfloat16))) == 2


def test_a_rounded_result_that_a_loop_reads_stays_rounded() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.float().sum(-1, keepdim=True).to(torch.bfloat16)
        return total, x * total

    plan = _plan(fn, torch.randn(8, 32).to(torch.bfloat16))
    rounded = [m for k in plan.kernels for m in k.members if m.loop.kind == "map"]
    assert any("round_to_bf16" in m.loop.value.text() for m in rounded)


def test_a_buffer_that_is_read_before_keeps_its_old_value() -> None:
    def fn(x: Tensor, buffer: Tensor) -> Tensor:
        total = x.abs().amax()
        result = x + buffer
        buffer.fill_(total)
        return result

    x, buffer = torch.randn(8, 4), torch.ones(1)
    compiled = torch.compile(fn, backend="perfuse")
    result = compiled(x, buffer)
    torch.testing.assert_close(result, x + 1)
    torch.testing.assert_close(buffer, x.abs().amax().reshape(1))


def test_a_result_that_is_updated_before_it_is_rounded_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sum(0).index_put((torch.arange(3),), torch.ones(())).to(torch.bfloat16)

    assert _loops(_plan(fn, torch.randn(64, 32))) == 3


def test_what_a_program_rounds_and_widens_again_is_rounded() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        total, exact = x.sum(0), x.double().sum(0)
        return total.bfloat16().float(), x.amax(1).half().float(), exact.float().double()

    got = torch.compile(fn, backend="perfuse")(torch.randn(64, 32))
    for result, kind in zip(got, (torch.bfloat16, torch.half, torch.float), strict=True):
        assert torch.equal(result, result.to(kind).to(result.dtype))
