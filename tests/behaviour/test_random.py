"""Random ops: the right distribution, the seed obeyed, the same mask in backward."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness.backend import compiled, eager_random

NUM = 200_000


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.3)


def two_kinds_of_draws(x: Tensor) -> Tensor:
    """The first waits for a loop, the second for nothing: they must not change places."""
    kept = F.dropout(x.sin(), 0.2) == 0
    return torch.stack([kept, F.feature_alpha_dropout(x.view(3, -1), 0.5, True).view(-1) > 0])


@pytest.mark.parametrize(
    ("draw", "mean", "variance"),
    (
        (lambda x: torch.rand_like(x), 0.5, 1 / 12),
        (lambda x: torch.randn_like(x), 0.0, 1.0),
        (lambda x: dropout(x + 1), 1.0, 0.3 / 0.7),
        (lambda x: torch.bernoulli(x + 0.2), 0.2, 0.16),
        (lambda x: torch.randint_like(x, 0, 10), 4.5, 99 / 12),
    ),
    ids=("rand", "randn", "dropout", "bernoulli", "randint"),
)
def test_distribution(draw: Callable[[Tensor], Tensor], mean: float, variance: float) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    drawn = compiled(draw)(torch.zeros(NUM)).double()
    # Five standard errors; the variance of a variance is at most that of a normal, 2 v^2 / n.
    assert abs(drawn.mean() - mean) < 5 * math.sqrt(variance / NUM)
    assert abs(drawn.var() - variance) < 5 * variance * math.sqrt(2 / NUM)


def test_each_call_differs_and_a_seed_repeats() -> None:
    torch._dynamo.reset()
    candidate = compiled(dropout)
    x = torch.ones(1000)
    torch.manual_seed(3)
    first, second = candidate(x), candidate(x)
    torch.manual_seed(3)
    again = candidate(x)
    torch.manual_seed(4)
    other = candidate(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_two_draws_in_one_program_differ() -> None:
    torch._dynamo.reset()
    a, b = compiled(lambda x: (torch.rand_like(x), torch.rand_like(x)))(torch.zeros(100))
    assert not torch.equal(a, b)


def test_backward_uses_the_mask_of_forward() -> None:
    torch._dynamo.reset()
    x = torch.ones(4096, requires_grad=True)
    y = compiled(lambda t: dropout(t.exp()))(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient == 0, y == 0)
    assert 0.2 < float((y == 0).float().mean()) < 0.4


@pytest.mark.parametrize(
    "draw",
    (
        dropout,
        lambda x: torch.rand_like(x) * x,
        lambda x: torch.randn(7, 3) + x[:3],
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: x[torch.randperm(x.shape[0])],
        lambda x: F.dropout(F.dropout(x, 0.5), 0.1),
        two_kinds_of_draws,
    ),
    ids=("dropout", "rand_like", "randn", "bernoulli", "randperm", "two_dropouts", "in_order"),
)
def test_bit_equal_to_eager_with_fallback_random(draw: Callable[[Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    x = torch.linspace(-2, 2, 501)
    torch.manual_seed(11)
    eager = [draw(x), draw(x)]
    torch.manual_seed(11)
    with eager_random():
        candidate = compiled(draw)
        got = [candidate(x), candidate(x)]
    assert all(torch.equal(a, b) for a, b in zip(got, eager, strict=True))


def test_numbers_of_pythons_random_are_those_of_eager() -> None:
    """Dynamo traces them as float32, and passes them as float64."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + random.uniform(1, 2), x * random.randint(2, 9)

    torch._dynamo.reset()
    candidate, x = compiled(function), torch.linspace(-1, 1, 5)
    for seed in range(3):
        random.seed(seed)
        expected = function(x)
        random.seed(seed)
        torch.testing.assert_close(candidate(x), expected)
