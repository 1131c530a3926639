"""What leaves a graph is stored once, however many views of it leave or go to calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from perfuse.ir.program import View
from tests.unit.lower.rows import Row
from tests.unit.lower.samples import bf16, f32
from tests.unit.planning import plans_of, wants_grad


def two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    doubled = x * 2
    return doubled, doubled.view(-1)


def view_of_view(x: Tensor) -> tuple[Tensor, Tensor]:
    doubled = (x * 2).view(-1)
    return doubled.view(4, -1), doubled.view(2, -1).t()


def to_a_product(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    doubled = x * 2
    return doubled, doubled.view(-1, 4) @ w


def cut_off(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    cut = (x @ w)[:, :3].clone()
    return cut, cut.view(2, -1)


def copied_argument(x: Tensor) -> tuple[Tensor, Tensor]:
    own = x.clone()
    return own, own.view(-1)


def repeated_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    repeated = (x * 2)[:1].expand(3, -1).reshape(-1, 2)
    return repeated, repeated.view(-1)


# (function, inputs, buffers that hold results)
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int]] = {
    "two views": (two_views, (f32(4, 6),), 1),
    "a view of a view": (view_of_view, (f32(4, 6),), 1),
    "a result and an operand": (to_a_product, (f32(3, 2, 4), f32(4, 5)), 2),
    "a product that is cut off": (cut_off, (bf16(4, 6), bf16(6, 5)), 1),
    "a copy of an argument": (copied_argument, (f32(4, 6),), 1),
    "repeated rows and a view": (repeated_rows, (f32(4, 6),), 1),
    "two values": (lambda x: (x * 2, (x * 3).view(-1)), (f32(4, 6),), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_views_of_one_value_are_stored_once(name: str) -> None:
    fn, inputs, count = CASES[name]
    (plan,) = plans_of(fn, *inputs)
    results = {o.buffer for o in plan.program.outputs if isinstance(o, View)}
    stored = set().union(*(kernel.stored for kernel in plan.kernels))
    assert len(results) == count, str(plan)
    assert all(plan.program.buffers[name].kind == "temp" for name in results)
    assert stored <= results, str(plan)


@pytest.mark.parametrize("name", CASES)
def test_matches_eager(name: str) -> None:
    fn, inputs, _ = CASES[name]
    Row(name, fn, inputs, ("aten.mm.out",)).check()


def test_logits_that_are_returned_and_saved_are_stored_once() -> None:
    """Returned in three dimensions, read by the loss in two."""

    def loss_and_logits(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = (x.view(-1, 6) @ w.t()).view(2, 4, -1)
        flat = logits.view(-1, logits.shape[-1]).float()
        return torch.nn.functional.cross_entropy(flat, labels), logits

    x, w = wants_grad(bf16(2, 4, 6), bf16(33, 6))
    forward, _ = plans_of(loss_and_logits, x, w, torch.arange(8))
    large = [b for b in forward.program.buffers.values() if b.num_elements == 8 * 33]
    assert len(large) == 1, str(forward)
