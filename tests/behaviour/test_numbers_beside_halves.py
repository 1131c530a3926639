"""Numbers that a small float cannot represent: eager rounds them to it, but for some operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness.backend import compiled

NUMBERS = (0.1, 0.7, -0.3, 257, 1e-9)


def around(number: float, dtype: torch.dtype) -> Tensor:
    """The nearest small float, its neighbours, and others."""
    near = torch.tensor([number, -number, 3 * number, 1.0, 2.0, 0.0, -5.5, 77.0], dtype=dtype)
    steps = [torch.nextafter(near, torch.full_like(near, to)) for to in (-1e4, 1e4)]
    return torch.cat([near, *steps])


def compared(x: Tensor, n: float) -> list[Tensor]:
    return [x == n, x != n, x < n, x <= n, x > n, x >= n, x == torch.tensor(n)]


def divided(x: Tensor, n: float) -> list[Tensor]:
    remainders = [
        torch.remainder(x, n),
        torch.fmod(x, n),
        torch.remainder(n, torch.where(x.abs() > 1e-3, x, 1)),
    ]
    return [*remainders, torch.div(x, n, rounding_mode="floor"), x / n, x**n]


def added(x: Tensor, n: float) -> list[Tensor]:
    return [x + n, x - n, n - x, x + torch.tensor(n), (x - n).sign()]


def shrunk(x: Tensor, n: float) -> list[Tensor]:
    return [F.hardshrink(x, n), F.threshold(x, n, 3.0)]


def beside_integers(x: Tensor, n: float) -> list[Tensor]:
    i = torch.arange(2043, 2043 + len(x))
    return [i * x, x / i, i + x, i > x, x % i, i - i.to(x.dtype)]


def beside_one_integer(x: Tensor, n: float) -> list[Tensor]:
    i = torch.tensor([2043])  # a dimension more than a number has, and as exact
    return [x * i, x / i, torch.div(x * 16, i, rounding_mode="trunc"), x + i, x > i]


def limited(x: Tensor, n: float) -> list[Tensor]:
    """Limits and padding, compared with the number that they were given."""
    results = [x.clamp(max=n), x.clamp(min=n), x.clamp(max=torch.tensor(n, dtype=torch.float64))]
    return [r == n for r in (*results, F.pad(x, (2, 1), value=n), F.hardtanh(x, n - 1, n))]


def chosen(x: Tensor, n: float) -> list[Tensor]:
    i = torch.arange(2043, 2043 + len(x))
    return [torch.where(x > 0, x, torch.tensor(n).double()) == n, torch.where(x > 0, x, i) == i]


def computed(x: Tensor, n: float) -> list[Tensor]:
    """The same number beside itself: eager rounds both."""
    one = torch.where(x > 0, 1, x * 0 + 1)
    beside = torch.tensor(n, dtype=torch.float64)
    return [one * n == n, one * n >= beside, (one * n) % n, torch.fmod(one * n, beside)]


ALL = [
    compared, divided, added, shrunk, beside_integers, beside_one_integer, limited, chosen,
    computed,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)
def test_bits_are_eagers(
    function: Callable[[Tensor, float], list[Tensor]], dtype: torch.dtype
) -> None:
    def every(*given: Tensor) -> list[Tensor]:
        return [r for x, n in zip(given, NUMBERS, strict=True) for r in function(x, n)]

    torch._dynamo.reset()
    inputs = [around(n, dtype) for n in NUMBERS]
    for got, eager in zip(compiled(every)(*inputs), every(*inputs), strict=True):
        assert torch.equal(got.nan_to_num(9), eager.nan_to_num(9)), (got, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_at_a_limit_are_eagers(dtype: torch.dtype) -> None:
    def limited(x: Tensor) -> Tensor:
        return F.threshold(x, 0.1, 3.0) + x.clamp(-0.7, 0.3) + F.hardtanh(x, -0.3, 0.7)

    torch._dynamo.reset()
    x = torch.cat([around(n, dtype) for n in (0.1, 0.7, 0.3)]).requires_grad_()
    (got,) = torch.autograd.grad(compiled(limited)(x).sum(), x)
    (eager,) = torch.autograd.grad(limited(x).sum(), x)
    assert torch.equal(got, eager)
