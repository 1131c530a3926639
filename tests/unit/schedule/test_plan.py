"""Loops that share a kernel, in which role; loops that do not, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.schedule.plan import Plan
from tests.unit.lower.samples import bf16, f32, ids
from tests.unit.planning import plans_of, wants_grad


@dataclass(frozen=True)
class Row:
    """`kernels` are the roles in each kernel of the forward; `backward`, of the backward."""

    name: str
    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    kernels: list[str]
    backward: list[str] = field(default_factory=list)
    refused: str = ""
    dynamic: bool = False

    def __str__(self) -> str:
        return self.name

    def check(self) -> None:
        plans = plans_of(self.fn, *self.inputs, dynamic=self.dynamic)
        text = "\n\n".join(map(str, plans))
        expected = [self.kernels, self.backward][: len(plans)]
        assert [roles(plan) for plan in plans] == expected, text
        reasons = [r.reason for plan in plans for r in plan.refusals]
        if self.refused:
            assert any(self.refused in reason for reason in reasons), text


def roles(plan: Plan) -> list[str]:
    return [" ".join(m.role for m in kernel.members) for kernel in plan.kernels]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def quantised_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(x, x.shape[-1:], weight)
    return y.abs().amax(), (y * 2).to(torch.float8_e4m3fn)


def add_in_place(x: Tensor) -> Tensor:
    before = x * 3
    x.add_(1)
    return before


def read_old_row(x: Tensor) -> Tensor:
    total = x.sum(-1)
    x.mul_(2)
    return total


def far_apart(x: Tensor, w: Tensor) -> Tensor:
    y = x.cumsum(0) * 2
    return y + y.amax() + (y @ w).amax()


X = (32, 64)
SOFTMAX = "inner full inner row full"
NORM = "inner row inner inner row full"

ROWS = [
    Row("pointwise chain", lambda x: (x * 2 + 1).exp().relu(), (f32(*X),), ["full"]),
    Row("softmax", lambda x: torch.softmax(x, -1), (f32(*X),), [SOFTMAX]),
    Row("softmax in bf16", lambda x: torch.softmax(x, -1), (bf16(*X),), [SOFTMAX]),
    Row("softmax of any size", lambda x: torch.softmax(x, -1), (f32(*X),), [SOFTMAX],
        dynamic=True),
    Row("softmax of softmax", lambda x: torch.softmax(torch.softmax(x, -1) * 2, -1), (f32(*X),),
        ["inner full inner row " + SOFTMAX]),
    Row("softmax along rows of a softmax", lambda x: torch.softmax(torch.softmax(x, -1), 0),
        (f32(*X),), ["inner full inner row outer", "full outer", "full", "full"],
        refused="complete only after all rows"),
    Row("layer norm", layer_norm, (f32(*X), f32(64), f32(64)), [NORM]),
    Row("layer norm and backward", layer_norm, wants_grad(f32(*X), f32(64), f32(64)),
        [NORM], ["inner inner row row outer outer full"]),
    Row("norm, amax and fp8", quantised_norm, (f32(*X), f32(64)), ["inner row all full"]),
    Row("sum of everything", lambda x: x.sum(), (f32(*X),), ["all"]),
    Row("sum and amax of everything", lambda x: (x.sum(), x.amax()), (f32(*X),), ["all all"]),
    Row("column sum", lambda x: x.sum(0), (f32(*X),), ["outer"]),
    Row("row sum", lambda x: x.sum(1), (f32(*X),), ["inner"]),
    Row("row and column sums", lambda x: (x.sum(0), x.sum(1)), (f32(*X),), ["outer inner"]),
    Row("middle sum", lambda x: x.sum(1), (f32(4, *X),), ["inner"]),
    Row("argmax beside max", lambda x: (x.argmax(-1), x.amax(-1)), (f32(*X),), ["inner inner"]),
    Row("siblings", lambda x, y: (x.exp() + y, (x * y).sin(), x - y), (f32(*X), f32(*X)),
        ["full full full"]),
    Row("siblings of other shapes", lambda x: (x.view(-1) + 1, x.view(8, 4, 64) * 2), (f32(*X),),
        ["full full"]),
    Row("through a transpose", lambda x: x.exp().t().contiguous() + 1, (f32(*X),), ["full"]),
    Row("beside its transpose", lambda x: (x.exp(), x.exp().t().contiguous() * 2), (f32(*X),),
        ["full full"]),
    Row("divided by its largest", lambda x: x / x.abs().amax(), (f32(*X),), ["all", "full"],
        refused="complete only after all rows"),
    Row("shifted against itself", lambda x: (x.exp()[1:] + 1, x.exp()[:-1].sum(1)),
        (f32(33, 64),), ["full", "inner full"], refused="do not match"),
    Row("flipped", lambda x: (x.exp(), x.exp().flip(0)), (f32(*X),), ["full", "full"],
        refused="at a different index"),
    Row("rows of two sizes", lambda x, y: (x.sum(0), (y * x.sum(0)).exp()), (f32(8, 3), f32(5, 3)),
        ["outer", "full"], refused="do not match"),
    Row("a product ends a kernel", lambda x, w: (x.relu() @ w).relu(), (f32(*X), f32(64, 8)),
        ["full", "full"]),
    Row("scan runs alone", lambda x: (x * 2).cumsum(-1) + 1, (f32(*X),), ["scan", "full"]),
    Row("scatter runs alone", lambda x, i: torch.zeros(16, 64).index_add(0, i, x * 2),
        (f32(*X), ids(16, 32)), ["full", "scatter"]),
    Row("gather fuses", lambda x, i: (x[i] * 2).sum(-1), (f32(*X), ids(32, 9)), ["inner"]),
    Row("in place", add_in_place, (f32(*X),), ["full full"]),
    Row("in place after a reduction", read_old_row, (f32(*X),), ["inner", "full"],
        refused="overwritten in a loop of different shape"),
    Row("another kernel between", far_apart, (f32(*X), f32(64, 4)),
        ["scan", "all full", "all", "full"], refused="another kernel must run between"),
    Row("nothing to do", lambda x: x.view(-1), (f32(*X),), []),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_kernels(row: Row) -> None:
    row.check()


def softmax_plan() -> Plan:
    return plans_of(lambda x: torch.softmax(x, -1), f32(*X))[0]


def test_stages_number_the_sweeps() -> None:
    (kernel,) = softmax_plan().kernels
    assert [m.stage for m in kernel.members] == [0, 1, 1, 2, 2]
    assert kernel.stored == {kernel.members[-1].loop.out}


def test_bytes_are_each_buffer_once() -> None:
    (kernel,) = softmax_plan().kernels
    assert kernel.num_bytes == 2 * 4 * 32 * 64


def test_axes_that_memory_does_not_tell_apart_are_one() -> None:
    (plan,) = plans_of(lambda x: x + 1, f32(4, 8, 64))
    assert [axis.size for axis in plan.kernels[0].axes] == [4 * 8 * 64]


def test_in_place_writes_the_argument_once_it_was_read() -> None:
    (plan,) = plans_of(add_in_place, f32(*X))
    (kernel,) = plan.kernels
    assert plan.program.inputs[0] in kernel.stored
    assert kernel.members[-1].loop.out == plan.program.inputs[0]


def test_refusals_print() -> None:
    (plan,) = plans_of(lambda x: x / x.abs().amax(), f32(*X))
    assert "# b1 and b2 are not fused: b1 is complete only after all rows" in str(plan)


def test_dead_loops_are_dropped() -> None:
    def fn(x: Tensor) -> Tensor:
        x.sin().sum()
        return x + 1

    (plan,) = plans_of(fn, f32(*X))
    assert roles(plan) == ["full"] and "sin" not in str(plan)


def test_same_program_gives_the_same_plan() -> None:
    assert str(softmax_plan()) == str(softmax_plan())
