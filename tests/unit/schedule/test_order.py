"""The order of steps: large results of small operands come last, where that saves memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.errors import SpecError
from perfuse.schedule import schedule
from perfuse.schedule.lifetimes import lifetimes
from perfuse.schedule.plan import Kernel
from perfuse.schedule.verify import verify_plan
from perfuse.schedule.verify_memory import verify_memory
from tests.unit.planning import plans_of, wants_grad


def pooled_head(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Many rows at first, few in the end: the gradient of `b` is larger than what it is made of."""
    return F.gelu(F.gelu(x @ a) @ a).mean(1) @ b


def drawn(seed: int) -> list[Tensor]:
    rng = random.Random(seed)
    rows, width, classes = rng.randint(300, 600), rng.randint(40, 90), rng.randint(900, 1800)
    shapes = ((2, rows, width), (width, width), (width, classes))
    return wants_grad(*(torch.randn(s) for s in shapes))


@pytest.mark.parametrize("seed", range(3))
def test_a_large_gradient_comes_last(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = drawn(seed)
    _, late = plans_of(pooled_head, *inputs)
    monkeypatch.setattr(schedule, "late_results", lambda fuser, program, order: order)
    _, early = plans_of(pooled_head, *inputs)
    assert lifetimes(late).peak() < lifetimes(early).peak()
    last = late.steps[-1]
    assert not isinstance(last, Kernel)
    assert [late.program.buffers[n].shape for n in last.makes()] == [tuple(inputs[2].shape)]
    verify_plan(late)
    verify_memory(late)


def test_the_order_is_the_programs_where_that_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = wants_grad(torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 400))
    plans = plans_of(lambda x, a, b: F.gelu(x @ a) @ b, *inputs)
    monkeypatch.setattr(schedule, "late_results", lambda fuser, program, order: order)
    plain = plans_of(lambda x, a, b: F.gelu(x @ a) @ b, *inputs)
    assert [str(p.steps) for p in plans] == [str(p.steps) for p in plain]


def test_what_is_updated_in_place_is_multiplied_before() -> None:
    """A matmul reads a temporary, some rows of which are overwritten afterwards."""

    def fn(x: Tensor, w: Tensor, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        large = y.t() @ y
        total = y.index_put((rows,), values).sum(0)
        return large, torch.sort(torch.outer(total, total))[0].sum()

    rows = torch.tensor([0, 3])
    (plan,) = plans_of(fn, torch.randn(8, 64), torch.randn(64, 256), rows, torch.randn(2, 256))
    calls = [step for step in plan.steps if not isinstance(step, Kernel)]
    assert calls[1].op.startswith("aten.mm"), plan
    verify_plan(plan)
    late = (*(step for step in plan.steps if step is not calls[1]), calls[1])
    with pytest.raises(SpecError, match="in another order than the program"):
        verify_plan(replace(plan, steps=late))
