"""Sums of rows that are zero but for one place become that place's value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse.ir.program import Loop, Program
from tests.unit.lower.rows import compiled
from tests.unit.lower.samples import f32

WIDTH = 7


def picked(place: Tensor, v: Tensor) -> Tensor:
    return torch.where(torch.arange(WIDTH) == place[:, None], v[:, None], 0.0)


def kept(place: Tensor, v: Tensor) -> Tensor:
    is_kept = (place != 2)[:, None] & (place[:, None] == torch.arange(WIDTH))
    return torch.where(is_kept, v[:, None], 0.0)


def varying(place: Tensor, v: Tensor) -> Tensor:
    return torch.where(torch.arange(WIDTH) == place[:, None], v[:, None] * torch.arange(WIDTH), 0.0)


def not_zero(place: Tensor, v: Tensor) -> Tensor:
    return torch.where(torch.arange(WIDTH) == place[:, None], v[:, None], 1.0)


def several(place: Tensor, v: Tensor) -> Tensor:
    return torch.where(torch.arange(WIDTH) >= place[:, None], v[:, None], 0.0)


def reductions_of(program: Program) -> list[Loop]:
    return [n for n in program.nodes if isinstance(n, Loop) and n.is_reduction]


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    ("row", "is_swept"),
    [(picked, False), (kept, False), (varying, True), (not_zero, True), (several, True)],
)
def test_sum(row: Callable[..., Tensor], is_swept: bool, keepdim: bool) -> None:
    place = torch.tensor([0, 3, 6, -1, 7, 2, 1 << 40])
    v = f32(len(place))
    programs: list[Program] = []

    def total(place: Tensor, v: Tensor) -> Tensor:
        return row(place, v).sum(1, keepdim=keepdim)

    found = compiled(total, programs)(place, v)
    torch.testing.assert_close(found, total(place, v))
    assert bool(reductions_of(programs[0])) == is_swept


def test_backward_of_cross_entropy_sweeps_no_row_for_its_target() -> None:
    x = f32(5, 9).requires_grad_()
    target = torch.tensor([0, 8, -100, 3, 3])
    programs: list[Program] = []
    compiled(F.cross_entropy, programs)(x, target).backward()
    (wanted,) = torch.autograd.grad(F.cross_entropy(x, target), x)
    torch.testing.assert_close(x.grad, wanted)
    assert not reductions_of(programs[-1])


def test_what_was_overwritten_since_is_not_asked_again() -> None:
    def total(place: Tensor, v: Tensor) -> Tensor:
        row = picked(place, v)
        v.fill_(9.0)
        return row + row.sum(1, keepdim=True)

    place, v = torch.tensor([0, 3, 6]), f32(3)
    torch.testing.assert_close(compiled(total, [])(place, v.clone()), total(place, v.clone()))
