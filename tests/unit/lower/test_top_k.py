"""Top-k as reductions: eager's elements, and positions of them; equal ones in their own order."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from perfuse.ir.program import LibraryCall, Program
from tests.unit.lower.rows import compiled

SPECIAL = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 6e-8, -6e-8)


def _drawn(draw: random.Random, shape: list[int]) -> Tensor:
    """Random bits, or few values of which many are equal, with special ones among them."""
    bits = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)
    number = draw.choice([torch.randn(shape), torch.randint(-2, 3, shape).float()])
    x = draw.choice([bits.view(torch.float32), number])
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape)]
    return torch.where(torch.rand(shape) < draw.choice([0, 0.1, 0.9]), special, x)


def among_scores(x: Tensor, own: Tensor) -> Tensor:
    """`x`, where `own` is true: like the scores of a gate, it may be an exponential."""
    return torch.where(own, x, x.exp())


def check(x: Tensor, k: int, dim: int, largest: bool, ours: list[Tensor]) -> None:
    values, places = ours
    eager = torch.topk(x, k, dim, largest)
    for have, want in zip(ours, eager, strict=True):
        assert have.dtype is want.dtype and have.shape == want.shape
    torch.testing.assert_close(values, eager.values, rtol=0, atol=0, equal_nan=True)
    chosen = x.gather(dim, places)
    torch.testing.assert_close(chosen, values, rtol=0, atol=0, equal_nan=True)
    # Minus zero is below zero: the sign is that of the element.
    numbers = ~values.isnan()
    assert torch.equal(torch.signbit(chosen)[numbers], torch.signbit(values)[numbers])
    ordered = places.sort(dim).values
    assert bool((ordered.diff(dim=dim) > 0).all()), "an element is chosen twice"
    wide = eager.values.double().nan_to_num(nan=math.inf)
    same = wide.diff(dim=dim) == 0
    rising = places.diff(dim=dim) > 0
    zeros = wide.narrow(dim, 0, k - 1) == 0
    nans = chosen.narrow(dim, 0, k - 1).isnan() != chosen.narrow(dim, 1, k - 1).isnan()
    assert bool((rising | ~same | zeros | nans).all()), "equal elements change places"


@pytest.mark.parametrize("seed", range(30))
def test_random_rows_match_eager(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
    dim = draw.randrange(-len(shape), len(shape))
    shape[dim] = draw.choice([1, 2, 7, 16, 33, 64])
    k = draw.choice([1, shape[dim], draw.randint(1, shape[dim])])
    k, largest, is_sorted = min(k, 16), draw.random() < 0.6, draw.random() < 0.8
    x = _drawn(draw, shape)
    add = draw.choice([0, 3])
    programs: list[Program] = []
    own = torch.ones(shape, dtype=torch.bool)
    fn = compiled(
        lambda y, o: tuple(torch.topk(among_scores(y + add, o), k, dim, largest, is_sorted)),
        programs,
    )
    check(x + add, k, dim, largest, fn(x, own))
    assert not any(isinstance(n, LibraryCall) for p in programs for n in p.nodes)
