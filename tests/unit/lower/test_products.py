"""Operands of products: made once, and as the graph lays them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from perfuse.ir.program import Extern, View
from perfuse.schedule.plan import Plan
from tests.unit.lower.rows import Row
from tests.unit.lower.samples import f32
from tests.unit.planning import plans_of


def both_ways(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    padded = F.pad(x, (0, 3))
    return padded.t() @ a, padded @ b


def around_a_change(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    first = (x + 1) @ b
    x.mul_(2)
    return first, (x + 1) @ b


MM, BMM = ("aten.mm.out",), ("aten.bmm.out",)
BOTH = (both_ways, (f32(6, 5), f32(6, 4), f32(8, 7)))
ROWS = [
    Row("operand_both_ways", *BOTH, MM),
    Row("operand_turned", lambda x, b: F.pad(x, (0, 3)).t() @ b, (f32(6, 5), f32(6, 4)), MM),
    Row("operand_changed", around_a_change, (f32(6, 5), f32(5, 4)), MM),
    Row("operand_of_batches", lambda x, b: (x + 1).transpose(1, 2) @ b,
        (f32(3, 6, 5), f32(3, 6, 4)), BMM),
    Row("operand_of_one_row", lambda x, b: (x + 1).t() @ b, (f32(1, 5), f32(1, 4)), MM),
    Row("operands_dynamic", *BOTH, MM, dynamic=True),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_matches_eager(row: Row) -> None:
    row.check()


def operands(plan: Plan) -> list[View]:
    calls = [s for s in plan.steps if isinstance(s, Extern)]
    return [arg for call in calls for arg in call.args if isinstance(arg, View)]


def only_plan(fn: Callable[..., Any], *inputs: Tensor) -> Plan:
    (plan,) = plans_of(fn, *inputs)
    return plan


def test_an_operand_in_both_directions_is_made_once() -> None:
    plan = only_plan(BOTH[0], *BOTH[1])
    assert len(plan.kernels) == 1, str(plan)
    turned, _, straight, _ = operands(plan)
    assert turned.buffer == straight.buffer
    assert (turned.strides, straight.strides) == ((1, 8), (8, 1))


def test_an_operand_is_not_turned_on_its_way_to_memory() -> None:
    plan = only_plan(lambda x, b: F.pad(x, (0, 3)).t() @ b, f32(6, 5), f32(6, 4))
    assert operands(plan)[0].strides == (1, 8)


def test_memory_that_changes_between_two_products_is_read_twice() -> None:
    plan = only_plan(around_a_change, f32(6, 5), f32(5, 4))
    first, _, second, _ = operands(plan)
    assert first.buffer != second.buffer
