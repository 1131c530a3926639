"""torchao's float8 training and inference on a GPU, compiled: as exact as torchao by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.fp8_block import Block
from tests.harness.backend import compiled
from tests.harness.torchao import needs_torchao, quantised, with_recipe

pytestmark = needs_torchao


@pytest.fixture(autouse=True)
def new_dynamo() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def step(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    given = x.clone().requires_grad_()
    result = call(given)
    wanted = [given, *module.parameters()]
    return [result.detach(), *torch.autograd.grad(result, wanted, torch.ones_like(result))]


def errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    pairs = [(a.double(), b.double()) for a, b in zip(got, exact, strict=True)]
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_training_step(recipe: str, device: str) -> None:
    block, x = Block(256, 512, 4).to(device), torch.randn(2, 64, 256, device=device)
    exact = step(block, block, x)
    block, x = with_recipe(block.bfloat16(), recipe), x.bfloat16()
    mine, theirs = step(block, compiled(block, fullgraph=True), x), step(block, block, x)
    for ours, eager in zip(errors(mine, exact), errors(theirs, exact), strict=True):
        assert ours <= 1.2 * eager + 2**-8, (ours, eager)


@pytest.mark.parametrize(
    "scheme",
    ["Float8WeightOnlyConfig", "Int8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"],
)
@torch.no_grad()
def test_inference(scheme: str, device: str) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 256)).to(device)
    x = torch.randn(64, 256, device=device)
    exact = model(x)
    model, x = quantised(model.bfloat16(), scheme), x.bfloat16()
    (ours,) = errors([compiled(model, fullgraph=True)(x)], [exact])
    (eager,) = errors([model(x)], [exact])
    assert ours <= 1.2 * eager + 2**-8
