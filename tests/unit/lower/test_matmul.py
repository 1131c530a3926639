"""Operands of products: made once, and as the graph lays them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.graph.aligned_matmul import aligned_matmul
from perfuse.ir.program import LibraryCall, Matmul, Program, View
from perfuse.schedule.plan import Plan
from tests.unit.lower.rows import Row, compiled
from tests.unit.lower.samples import bf16, f16, f32
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
    calls = [s for s in plan.steps if isinstance(s, LibraryCall)]
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


def test_an_operand_of_several_shapes_is_made_once() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * 2
        return (y.view(12, 5) @ w).sum() + torch.bmm(y.mT, y).sum()

    (plan,) = plans_of(function, torch.randn(3, 4, 5), torch.randn(5, 6))
    assert str(plan).count("mul(") == 1, str(plan)


def test_an_operand_is_not_turned_on_its_way_to_memory() -> None:
    plan = only_plan(lambda x, b: F.pad(x, (0, 3)).t() @ b, f32(6, 5), f32(6, 4))
    assert operands(plan)[0].strides == (1, 8)


def test_memory_that_changes_between_two_products_is_read_twice() -> None:
    plan = only_plan(around_a_change, f32(6, 5), f32(5, 4))
    first, _, second, _ = operands(plan)
    assert first.buffer != second.buffer


def by_rows_alike(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = aligned_matmul(x, weight.t())
    return result


def with_readers(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    product = by_rows_alike(x, weight)
    return product.view(-1, 1), product.exp().sum(1)


# Columns that are 1, 2, 4 and 7 more than a multiple of the eight halves in sixteen bytes.
ALIGNED_ROWS = [
    Row("one_more", by_rows_alike, (bf16(19, 16), bf16(41, 16)), MM),
    Row("two_more", by_rows_alike, (f16(19, 16), f16(42, 16)), MM),
    Row("four_more", by_rows_alike, (bf16(24, 16), bf16(44, 16)), MM),
    Row("one_less", by_rows_alike, (bf16(17, 16), bf16(47, 16)), MM),
    Row("none_more", by_rows_alike, (bf16(9, 16), bf16(40, 16)), MM),
    Row("fewer_rows_than_lie_apart", by_rows_alike, (bf16(3, 16), bf16(41, 16)), MM),
    Row("four_bytes", by_rows_alike, (f32(11, 16), f32(43, 16)), MM),
    Row("computed_operands", lambda x, w: by_rows_alike(x + 1, w * 2),
        (bf16(19, 16), bf16(41, 16)), MM),
    Row("read_and_returned", with_readers, (bf16(19, 16), bf16(41, 16)), MM),
]  # fmt: skip


@pytest.mark.parametrize("row", ALIGNED_ROWS, ids=str)
def test_an_aligned_matmul_is_the_product(row: Row) -> None:
    row.check()


@pytest.mark.parametrize("columns", [1025, 1026, 1027, 1028, 1030, 1031])
def test_every_call_of_an_aligned_matmul_sees_aligned_rows(columns: int) -> None:
    plan = only_plan(by_rows_alike, bf16(21, 16), bf16(columns, 16))
    calls = [s for s in plan.steps if isinstance(s, LibraryCall)]
    for view in (v for call in calls for v in (*call.args, call.window) if v is not None):
        pitch = max(view.strides)  # from one row, or column, to the next
        assert view.offset % 8 == 0 and pitch % 8 == 0, str(plan)


def test_an_aligned_matmul_holds_one_result() -> None:
    plan = only_plan(by_rows_alike, bf16(256, 16), bf16(1025, 16))
    sizes = {n: b.num_elements for n, b in plan.program.buffers.items() if b.kind == "temp"}
    assert sorted(sizes.values()) == [256 * 8, 256 * 8, 256 * 1025]
    assert sum(k.num_bytes for k in plan.kernels) == 2 * 2 * 256 * 8 * 2, "edges, in and out"


i8 = torch.randint(-4, 4, (32, 32), dtype=torch.int8)
PLANNED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "linear": (F.linear, (bf16(4, 8), bf16(6, 8), bf16(6))),
    "scaled": (partial(torch.addmm, beta=0.5, alpha=2), (f16(6), f16(4, 8), f16(8, 6))),
    "batched": (torch.baddbmm, (bf16(2, 4, 6), bf16(2, 4, 8), bf16(2, 8, 6))),
    "of_integers": (torch.addmm, (i8[0].long(), i8.long(), i8.long())),
    "of_bytes": (torch._int_mm, (i8, i8)),
    "vector": (torch.addmv, (f32(4), f32(4, 8), f32(8))),
}


@pytest.mark.parametrize("name", PLANNED)
def test_a_planned_matmul_is_not_a_fallback(name: str) -> None:
    fn, inputs = PLANNED[name]
    programs: list[Program] = []
    context = replace(Context.default(), counters=Counters())
    got = compiled(fn, programs, context=context)(*inputs)
    (node,) = programs[0].nodes
    assert isinstance(node, Matmul), str(programs[0])
    counted = [name for name in context.counters.snapshot() if name.startswith("fallback")]
    assert not counted
    assert torch.equal(got, fn(*inputs)), "the same call of the same library"


def test_a_complex_matmul_is_a_fallback() -> None:
    x, programs = f32(4, 4).to(torch.complex64), list[Program]()
    context = replace(Context.default(), counters=Counters())
    compiled(torch.mm, programs, context=context)(x, x)
    assert context.counters.snapshot() == {"fallback.aten.mm.default": 1}
