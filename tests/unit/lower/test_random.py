"""Random numbers: ranges, moments, one seed per op, and eager's own draws on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse import config
from perfuse.context import Context
from perfuse.ir.program import LibraryCall, Program
from tests.unit.lower.rows import compiled
from tests.unit.lower.samples import f32

COUNT = 4096


def _drawn(fn: Callable[..., Any], *inputs: Tensor) -> tuple[Any, Program]:
    programs: list[Program] = []
    torch.manual_seed(0)
    result = compiled(fn, programs)(*inputs)
    assert not any(isinstance(node, LibraryCall) for node in programs[0].nodes)
    return result, programs[0]


# name, function of a tensor of COUNT zeros, mean, standard deviation, least, most
DRAWS: list[tuple[str, Callable[[Tensor], Tensor], float, float, float, float]] = [
    ("rand", lambda x: torch.rand(COUNT) + x, 0.5, 0.2887, 0, 1),
    ("rand_like", torch.rand_like, 0.5, 0.2887, 0, 1),
    ("rand_bf16", lambda x: torch.rand_like(x.bfloat16()).float(), 0.5, 0.2887, 0, 0.999),
    ("randn", lambda x: torch.randn(COUNT) + x, 0, 1, -9, 9),
    ("randn_like", torch.randn_like, 0, 1, -9, 9),
    ("uniform", lambda x: x.clone().uniform_(2, 6), 4, 1.1547, 2, 6),
    ("normal", lambda x: x.clone().normal_(3, 2), 3, 2, -20, 20),
    ("exponential", lambda x: x.clone().exponential_(2.0), 0.5, 0.5, 0, 99),
    ("bernoulli", lambda x: torch.bernoulli(x + 0.25), 0.25, 0.433, 0, 1),
    ("bernoulli_p", lambda x: x.clone().bernoulli_(0.25), 0.25, 0.433, 0, 1),
    ("randint", lambda x: torch.randint(2, 6, (COUNT,)) + x, 3.5, 1.118, 2, 5),
    ("randint_like", lambda x: torch.randint_like(x, 4), 1.5, 1.118, 0, 3),
    ("dropout", lambda x: F.dropout(x + 1, 0.25), 1, 0.577, 0, 1.334),
]


@pytest.mark.parametrize("row", DRAWS, ids=lambda row: row[0])
def test_distribution(
    row: tuple[str, Callable[[Tensor], Tensor], float, float, float, float],
) -> None:
    _, fn, mean, deviation, least, most = row
    drawn, _ = _drawn(fn, torch.zeros(COUNT))
    assert drawn.shape == (COUNT,) and least <= drawn.min() and drawn.max() <= most
    # Five standard errors of the mean, and of the deviation.
    error = 5 * deviation / COUNT**0.5
    assert abs(float(drawn.mean()) - mean) <= error + 0.002
    assert abs(float(drawn.std()) - deviation) <= 2 * error


def test_each_op_has_its_own_seed() -> None:
    (a, b), program = _drawn(lambda x: (torch.rand_like(x), torch.rand_like(x)), f32(64))
    assert not torch.equal(a, b)
    assert program.buffers["seeds"].kind == "seeds"
    assert program.buffers["seeds"].shape == (2,)


def test_gradient_of_dropout_uses_the_same_mask() -> None:
    x = torch.ones(COUNT, requires_grad=True)
    out = compiled(lambda x: F.dropout(x, 0.5), [])(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, out.detach())


@pytest.mark.parametrize("fn", [torch.rand_like, torch.randn_like, torch.bernoulli])
def test_fallback_random_draws_as_eager(fn: Callable[[Tensor], Tensor]) -> None:
    with config.patch(fallback_random=True):
        context = Context.default()
    x = torch.full((7,), 0.5)
    torch.manual_seed(3)
    ours = compiled(fn, [], context=context)(x)
    torch.manual_seed(3)
    assert torch.equal(ours, fn(x))
