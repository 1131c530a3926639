"""Operands that are widened for one matmul alone are read as they are stored; others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from perfuse.ir.program import Matmul
from perfuse.schedule.plan import Plan
from perfuse.schedule.read_stored import ReadStored, compute_right, read_stored
from perfuse.schedule.schedule import place
from perfuse.schedule.verify import verify_plan
from tests.unit.lower.samples import bf16, f32, i32
from tests.unit.planning import CONTEXT, plans_of

X, SCALE = f32(8, 96), f32(64)
NARROW = torch.arange(64 * 96).view(64, 96).to(torch.int8)


def scaled(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return (x @ w.to(x.dtype).t()) * s


def read(fn: Callable[..., Any], *inputs: Tensor) -> tuple[Plan, ReadStored]:
    (plan,) = plans_of(fn, *inputs)
    matmul = next(step for step in plan.steps if isinstance(step, Matmul))
    return plan, read_stored(plan, matmul)


@pytest.mark.parametrize(
    "inputs",
    [(X, NARROW, SCALE), (X, bf16(64, 96), SCALE), (bf16(8, 96), NARROW, bf16(64))],
    ids=["int8", "bf16", "bf16 by int8"],
)
def test_weights_are_read_as_they_are_stored(inputs: tuple[Tensor, ...]) -> None:
    plan, found = read(scaled, *inputs)
    assert found.matmul.operands.b.buffer == "i1" and len(found.widening) == 1
    assert len(found.plan.steps) == len(plan.steps) - 1
    assert len(found.plan.program.nodes) == len(plan.program.nodes) - 1
    verify_plan(place(found.plan, CONTEXT))


def used_twice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x @ (wide := w.float()).t(), wide + 1


def returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x @ (wide := w.float()).t(), wide


def computed(x: Tensor, w: Tensor) -> Tensor:
    return x @ (w.float() * 2).t()


def flipped(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.float().flip(0).t()


@pytest.mark.parametrize("fn", [used_twice, returned, computed, flipped])
def test_left_alone(fn: Callable[..., Any]) -> None:
    plan, found = read(fn, X, NARROW)
    assert found.plan is plan and not found.widening


def test_types_that_would_be_rounded_are_left_alone() -> None:
    _, found = read(lambda x, w: x @ w.float().t(), X, i32(64, 96))
    assert not found.widening


@pytest.mark.parametrize("fn", [computed, scaled], ids=["scaled", "widened"])
def test_a_weight_is_computed_inside(fn: Callable[..., Any]) -> None:
    given = (X, NARROW, SCALE)[: 3 if fn is scaled else 2]
    (plan,) = plans_of(fn, *given)
    matmul = next(step for step in plan.steps if isinstance(step, Matmul))
    found = compute_right(plan, matmul)
    assert found.prologue is not None and found.prologue.out == matmul.operands.b.buffer
    assert found.matmul is matmul and len(found.plan.steps) == len(plan.steps) - 1


def by_rows(x: Tensor, w: Tensor) -> Tensor:
    return x @ (w.float() * 2).view(96, 64)


def in_pairs_of_columns(x: Tensor, w: Tensor) -> Tensor:
    pairs = w[:, :95].reshape(-1, 2).float() * torch.tensor([2.0, 3.0])
    return x[:, :95] @ pairs.view(64, 95).t()


@pytest.mark.parametrize("fn", [used_twice, returned, by_rows, in_pairs_of_columns])
def test_other_operands_are_stored(fn: Callable[..., Any]) -> None:
    (plan,) = plans_of(fn, X, NARROW)
    matmul = next(step for step in plan.steps if isinstance(step, Matmul))
    assert compute_right(plan, matmul).prologue is None


def unpacked(x: Tensor, w: Tensor) -> Tensor:
    pairs = torch.stack([w & 15, w >> 4], -1).view(32, -1, 48)
    return x @ (pairs.float() * 2).view(32, 192).t()


def packed_and_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    pairs = torch.stack([w & 15, w >> 4], -1)
    return x @ (pairs.view(32, -1, 48).float() * 2).view(32, 192).t(), pairs


@pytest.mark.parametrize("fn", [unpacked, packed_and_returned])
def test_pairs_are_unpacked_inside_unless_they_are_needed(fn: Callable[..., Any]) -> None:
    (plan,) = plans_of(fn, f32(8, 192), NARROW[:32])
    matmul = next(step for step in plan.steps if isinstance(step, Matmul))
    found, is_alone = compute_right(plan, matmul), fn is unpacked
    assert found.prologue is not None
    reads = {read.buffer for read in found.prologue.reads()}
    assert (reads == {"i1"}) == is_alone
    assert len(found.widening) == (3 if is_alone else 1)
    verify_plan(place(plan, CONTEXT))
