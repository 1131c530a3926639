"""Layers of experts as people write them, against eager: values, gradients, uneven choices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, silu

from tests.harness.compare import assert_as_good_as_eager

HIDDEN, EXPERTS, TOKENS = 64, 4, 128


class Layer(nn.Module):
    """Two of four experts for each token; `favour` is added to their scores."""

    def __init__(self, mix: Callable[..., Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.up = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def expert(self, number: int, x: Tensor) -> Tensor:
        return self.down[number](silu(self.up[number](x)))

    def forward(self, x: Tensor, favour: Tensor) -> Tensor:
        weights, chosen = torch.topk(torch.softmax(self.gate(x) + favour, -1), 2, dim=-1)
        return self.mix(self, x, weights / weights.sum(-1, keepdim=True), chosen)


def where(layer: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    mask = one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number in range(EXPERTS):
        place, token = torch.where(mask[number])
        out.index_add_(0, token, layer.expert(number, x[token]) * weights[token, place, None])
    return out


def skipping(layer: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        token, place = torch.where(chosen == number)
        if token.numel() > 0:
            out[token] += layer.expert(number, x[token]) * weights[token, place, None]
    return out


def dense(layer: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    gates = x.new_zeros(x.shape[0], EXPERTS).scatter(1, chosen, weights)
    return sum(layer.expert(n, x) * gates[:, n : n + 1] for n in range(EXPERTS))


FAVOURS = {
    "spread": [0.0, 0.0, 0.0, 0.0],
    "two for all": [30.0, 0.0, 60.0, 0.0],  # and no token for the others
}


def gradients(layer: nn.Module, run: Any, x: Tensor, favour: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    result = run(x, favour)
    result.square().sum().backward()
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
    assert x.grad is not None
    return [result.detach(), x.grad, *(grad.clone() for grad in zeros)]


def check(mix: Callable[..., Tensor], favours: list[list[float]], **options: Any) -> None:
    torch.manual_seed(0)
    layer = Layer(mix)
    wide = copy.deepcopy(layer).double()
    compiled = torch.compile(layer, backend="perfuse", **options)
    for number, given in enumerate(favours):
        x, favour = torch.randn(TOKENS + number, HIDDEN), torch.tensor(given)
        eager = gradients(layer, layer, x, favour)
        exact = gradients(wide, wide, x.double(), favour.double())
        found = gradients(layer, compiled, x, favour)
        for got, want, right in zip(found, eager, exact, strict=True):
            assert_as_good_as_eager(got, want, right)


@pytest.mark.parametrize("favour", ["two for all"])
@pytest.mark.parametrize("mix", [where, skipping, dense], ids=lambda f: f.__name__)
def test_loops_over_experts(mix: Callable[..., Tensor], favour: str) -> None:
    torch._dynamo.reset()
    check(mix, [FAVOURS[favour]], options={"verify": "memory"})


def test_changing_choices_and_numbers_of_tokens() -> None:
    torch._dynamo.reset()
    check(where, [FAVOURS["spread"], FAVOURS["two for all"], FAVOURS["spread"]])


def test_the_loop_as_one_graph() -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(where, [FAVOURS["two for all"], FAVOURS["spread"]], fullgraph=True, dynamic=False)
