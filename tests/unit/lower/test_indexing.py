"""Loads and stores by position, scans: lowered formulas against eager, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.schedule.plan import Plan
from tests.unit.lower.rows import Row, compiled
from tests.unit.lower.samples import bf16, f32, i32, i64, ids, mask
from tests.unit.planning import plans_of


def _put(x: Tensor, i: Any, value: Any, accumulate: bool = False) -> Tensor:
    return x.index_put(i, value, accumulate)


def _assign_column(x: Tensor, i: Tensor, value: Tensor) -> Tensor:
    made = x.clone()
    made[:, i] = value
    return made


PERM = torch.tensor([3, 0, 4, 1])
ROWS = [
    Row("gather", lambda x, i: (x.gather(1, i), x.exp().gather(-1, i) + 1),
        (f32(5, 7), ids(7, 4, 3))),
    Row("gather_dim0", lambda x, i: x.gather(0, i), (f32(5, 7), ids(5, 4, 3))),
    Row("gather_scalar", lambda x, i: x.gather(0, i), (f32(), ids(1))),
    Row("gather_grad", lambda x, i: x.gather(1, i).exp(), (f32(5, 7), ids(7, 4, 3)), grad=True),
    Row("index_one", lambda x, i: (x[i], x[:, i], x[i].exp()), (f32(5, 5), ids(5, 4))),
    Row("index_negative", lambda x, i: x[i - 5], (f32(5, 7), ids(5, 4))),
    Row("index_two", lambda x, i, j: x[i, j], (f32(5, 7), ids(5, 4), ids(7, 3, 1))),
    Row("index_middle", lambda x, i, j: x[:, i, j] + x[:, i, :, 0].sum(-1, keepdim=True),
        (f32(2, 5, 7, 3)[..., :3].permute(0, 1, 2, 3), ids(5, 4), ids(7, 4)), ()),
    Row("index_apart", lambda x, i, j: x[i, :, j], (f32(5, 3, 7), ids(5, 4), ids(7, 2, 4))),
    Row("index_int32", lambda x, i: x[i], (f32(5, 7), ids(5, 4).int())),
    Row("index_grad", lambda x, i, j: x[i, :, j] * 2, (f32(5, 3, 7), ids(5, 4), ids(7, 4)),
        grad=True),
    Row("index_arange", lambda x: x[torch.arange(4), torch.arange(4) + 1], (f32(5, 7),)),
    Row("index_empty", lambda x, i: x[i[:0]] + 1, (f32(5, 7), ids(5, 4))),
    Row("index_of_index", lambda x, i, j: x[i[j]], (f32(5, 7), ids(5, 9), ids(9, 4))),
    Row("index_dynamic", lambda x, i: x[i] * 2, (f32(5, 7), ids(5, 4)), dynamic=True),
    Row("index_select", lambda x, i: (x.index_select(0, i), x.exp().index_select(1, i)),
        (f32(5, 7), ids(5, 4))),
    Row("index_select_grad", lambda x, i: x.index_select(0, i) * 2, (f32(5, 7), ids(5, 4)),
        grad=True),
    Row("take", lambda x, i: (torch.take(x, i), torch.take(x.exp(), i - 35)),
        (f32(5, 7), ids(35, 3, 2))),
    Row("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), (f32(5, 7), ids(7, 5, 2))),
    Row("embedding", lambda w, i: F.embedding(i, w) * 2, (f32(11, 4), ids(11, 2, 3))),
    Row("embedding_grad", lambda w, i: F.embedding(i, w, padding_idx=3).exp(),
        (f32(11, 4), ids(11, 5, 9)), grad=True),
    Row("embedding_bf16", lambda w, i: F.embedding(i, w).exp(), (bf16(11, 4), ids(11, 2, 3)),
        grad=True),
    Row("scatter_src", lambda x, i, s: x.scatter(1, i, s),
        (f32(3, 7), torch.stack([PERM, PERM + 2, PERM]), f32(3, 5))),
    Row("scatter_value", lambda x, i: (x.scatter(1, i, 2.5), x.exp().scatter(0, i % 3, 1)),
        (f32(3, 7), ids(7, 3, 4))),
    Row("scatter_corner", lambda x, i, s: x.scatter(0, i, s),
        (f32(5, 7), PERM[None, :], f32(2, 6))),
    Row("scatter_add", lambda x, i, s: x.scatter_add(1, i, s.exp()),
        (f32(3, 7), ids(7, 2, 9), f32(3, 9))),
    Row("scatter_add_bf16", lambda x, i, s: x.scatter_add(1, i, s),
        (bf16(3, 7), ids(7, 2, 9), bf16(3, 9))),
    Row("scatter_add_int", lambda x, i, s: x.scatter_add(0, i, s), (i64(7), ids(7, 9), i64(9))),
    Row("scatter_reduce", lambda x, i, s: (x.scatter_reduce(1, i, s, "sum"),
                                           x.scatter_reduce(1, i, s, "sum", include_self=False)),
        (f32(3, 7), ids(7, 2, 9), f32(3, 9))),
    Row("scatter_amax", lambda x, i, s: x.scatter_reduce(1, i, s, "amax"),
        (f32(3, 7), ids(7, 2, 9), f32(3, 9)), ("aten.scatter_reduce.two",)),
    Row("scatter_scalar", lambda x, i: x.scatter(0, i, 3.0), (f32(), ids(1))),
    Row("index_put", lambda x, i, v: _put(x, (i,), v) + 1, (f32(5, 7), PERM, f32(4, 7))),
    Row("index_put_spread", _assign_column, (f32(5, 7), PERM, f32(4))),
    Row("index_put_add", lambda x, i, v: _put(x, (i, i), v, True), (f32(5, 7), ids(5, 9), f32(9))),
    Row("index_put_mask", lambda x, m: _put(x, (m,), torch.tensor(2.0)), (f32(5, 7), mask(5))),
    Row("assign_mask", lambda x, m: x.clone().masked_fill_(m, 0) + 1, (f32(5, 7), mask(5, 7))),
    Row("index_add", lambda x, i, s: (x.index_add(0, i, s), x.index_add(0, i, s, alpha=2)),
        (f32(5, 7), ids(5, 9), f32(9, 7))),
    Row("index_copy_fill", lambda x, i, s: (x.index_copy(0, i, s), x.index_fill(1, i, 3)),
        (f32(5, 7), PERM, f32(4, 7))),
    Row("one_hot", lambda i: F.one_hot(i, 8), (ids(8, 5),), ("aten._assert_async.msg",)),
    Row("nll_loss", lambda x, t: F.cross_entropy(x, t, ignore_index=2), (f32(9, 7), ids(7, 9)),
        grad=True),
    Row("nll_loss2d", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
        (f32(3, 7, 4), ids(7, 3, 4)), grad=True),
    Row("cumsum", lambda x: (x.cumsum(0), x.exp().cumsum(-1) + 1, x.long().cumsum(1)),
        (f32(5, 7),)),
    Row("cumsum_int", lambda x: (x.cumsum(0), x.cumsum(0, dtype=torch.float32)), (i32(5, 7),)),
    Row("cumsum_bool", lambda x: (x.cumsum(0), x.cumsum(1)), (mask(5, 7),)),
    Row("cumsum_bf16", lambda x: x.cumsum(1), (bf16(5, 7),)),
    Row("cumsum_ones", lambda x: (x.cumsum(1), x[0, 0].cumsum(0), x[:0].cumsum(0)), (f32(5, 1),)),
    Row("cumsum_middle", lambda x: x.cumsum(1), (f32(2, 5, 7),), grad=True),
    Row("cumprod", lambda x: (x.cumprod(0), x.cumprod(1)), (f32(5, 7),)),
    Row("logcumsumexp", lambda x: x.logcumsumexp(1), (f32(5, 7),), ("aten.logcumsumexp.default",)),
    Row("cummax", lambda x: x.cummax(1), (f32(5, 7),), ("aten.cummax.default",)),
    Row("trapezoid", lambda x: torch.trapezoid(x, dx=0.5), (f32(5, 7),)),
    Row("diff", lambda x: torch.diff(x), (f32(5, 7),)),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_matches_eager(row: Row) -> None:
    row.check()


@pytest.mark.parametrize("position", [-6, 5])
def test_positions_out_of_range_are_refused(position: int) -> None:
    run = compiled(lambda x, i: x[i] + 1, [])
    with pytest.raises(IndexError):
        run(f32(5, 7), torch.tensor([0, position]))


def largest_temporary(plan: Plan) -> int:
    buffers = [b for b in plan.program.buffers.values() if b.kind == "temp"]
    stored = {name for kernel in plan.kernels for name in kernel.stored}
    sizes = [b.num_elements for b in buffers if b.name in stored]
    return max(n for n in sizes if isinstance(n, int))


@pytest.mark.parametrize("draw", (f32, bf16))
def test_a_loss_stores_no_second_logits(draw: Callable[..., Tensor]) -> None:
    """One element of a row is looked up: the others' log-probabilities are not written down."""
    (plan,) = plans_of(F.cross_entropy, draw(16, 128), ids(128, 16))
    assert largest_temporary(plan) <= 16, str(plan)


def test_what_is_looked_up_often_is_computed_once() -> None:
    (plan,) = plans_of(lambda x, i: x.exp().tanh()[i], f32(8, 16), ids(8, 64))
    assert largest_temporary(plan) == 64 * 16
    assert 8 * 16 in [b.num_elements for b in plan.program.buffers.values() if b.kind == "temp"]
