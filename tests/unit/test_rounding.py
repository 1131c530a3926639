"""Random roundings: as large as they are said to be, and no cover for a wrong result."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.harness.compare import complaints
from tests.harness.rounding import NUM_DRAWS, RandomRounding, rounded_at_random

EPS = torch.finfo(torch.float32).eps


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def softmax_gradient(x: Tensor, grad: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(torch.softmax(x, 1), x, grad)[0]


def test_one_step_is_one_rounding() -> None:
    x = drawn(1000).double()
    with RandomRounding(EPS, 0):
        doubled, moved = x * 2, x.clone().neg()
    off = ((doubled - x * 2) / (x * 2)).abs()
    assert EPS / 4 < float(off.max()) <= EPS / 2
    assert torch.equal(moved, -x)  # nothing was computed


def test_in_place_steps_round_too() -> None:
    x = torch.ones(100, dtype=torch.float64)
    with RandomRounding(EPS, 0):
        x.add_(1)
    assert 0 < float((x - 2).abs().max()) <= EPS


def test_draws_differ_and_repeat() -> None:
    x = drawn(50).double()
    first, again = (rounded_at_random(lambda: x.exp().sum(), EPS) for _ in range(2))
    assert len({float(value) for value in first}) == NUM_DRAWS
    assert [float(v) for v in first] == [float(v) for v in again]


def test_fused_formulas_are_taken_apart() -> None:
    """The gradient of softmax subtracts a sum: its error is that of the sum, not of the result."""
    x, grad = drawn(5, 5) * 9, drawn(5, 5) + 100
    exact = softmax_gradient(x.double(), grad.double())
    draws = rounded_at_random(lambda: softmax_gradient(x.double(), grad.double()), EPS)
    assert max(float((d - exact).abs().max()) for d in draws) > 10 * EPS * float(exact.abs().max())


def test_a_wrong_result_stays_wrong() -> None:
    x = drawn(64, 64)
    exact = torch.softmax(x.double(), 1)
    draws = rounded_at_random(lambda: torch.softmax(x.double(), 1), EPS)
    eager = torch.softmax(x, 1)
    assert not complaints(eager.clone(), eager, exact, draws)
    wrong = eager.clone()
    wrong.view(-1)[wrong.argmax()] *= 1 + 64 * EPS
    assert complaints(wrong, eager, exact, draws)
    assert complaints(eager.roll(1, 0), eager, exact, draws)
