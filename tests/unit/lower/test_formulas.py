"""Formulas written another way: they are used, and as exact as what they replace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness.backend import compiled
from tests.unit.lower.samples import f32
from tests.unit.planning import plans_of


@dataclass(frozen=True)
class Row:
    """`gone` must not be in the printed program, `exps` exponentials must be."""

    name: str
    fn: Callable[[Tensor], Tensor]
    gone: str
    exps: int = 1

    def __str__(self) -> str:
        return self.name


ROWS = [
    Row("1 + erf", lambda x: 1 + torch.erf(x), "erf"),
    Row("erf + 1", lambda x: torch.erf(x) + 1, "erf"),
    Row("gelu", F.gelu, "erf"),
    Row("tanh of softplus", lambda x: torch.tanh(F.softplus(x)), "log1p"),
    Row("mish", F.mish, "log1p"),
]
KEPT = [
    Row("2 + erf", lambda x: 2 + torch.erf(x), "erf"),
    Row("1 + erf in double", lambda x: 1 + torch.erf(x.double()), "erf"),
    Row("tanh of another softplus", lambda x: torch.tanh(F.softplus(x, beta=2)), "log1p"),
    Row("softplus", F.softplus, "log1p"),
]


def printed(fn: Callable[..., Any]) -> str:
    (plan,) = plans_of(fn, f32(9))
    return str(plan.program)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_rewrites(row: Row) -> None:
    text = printed(row.fn)
    num_exps = sum(text.count(name) for name in ("exp(", "exp_mid(", "exp2_mid("))
    assert row.gone not in text and num_exps >= row.exps and "tanh" not in text, text


def test_the_line_in_gelu_is_rounded_once() -> None:
    assert "fma(" in printed(lambda x: F.gelu(x, approximate="tanh"))
    assert "fma(" not in printed(lambda x: x * x * 0.3 + 0.7)


@pytest.mark.parametrize("row", KEPT, ids=str)
def test_leaves_alone(row: Row) -> None:
    assert row.gone in printed(row.fn)


def samples() -> Tensor:
    """Dense where the functions bend, every power of two of both signs, infinities and NaN."""
    powers = torch.tensor([2.0**k for k in range(-149, 128)])
    edges = torch.tensor([20.0, 4.0, 4 * math.sqrt(2), 87.0, 88.0, 104.0, 3.4e38])
    near = torch.cat([edges, torch.nextafter(edges, torch.tensor(0.0)), edges * 1.001])
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    dense = torch.linspace(-25, 25, 200_001)
    return torch.cat([dense, torch.linspace(-1, 1, 50_001), powers, -powers, near, -near, odd])


def same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_as_exact_as_eager(row: Row) -> None:
    """At most twice eager's error plus one ulp; a value that is not finite is a reference's."""
    x = samples()
    got, eager, exact = compiled(row.fn)(x).double(), row.fn(x).double(), row.fn(x.double())
    odd = ~(eager.isfinite() & exact.isfinite())
    # Eager's own gelu of inf is NaN in float32 and inf in float64.
    assert bool((same(got, eager) | same(got, exact))[odd].all())
    x, got, eager, exact = x[~odd], got[~odd], eager[~odd], exact[~odd]
    scale = exact.abs().clamp(min=1)
    worst = float(((eager - exact).abs() / scale).max())
    limit = 2 * worst * scale + torch.finfo(torch.float32).eps * exact.abs()
    over = (got - exact).abs() / limit
    at = int(over.argmax())
    assert float(over[at]) <= 1, (float(x[at]), float(got[at]), float(exact[at]))
