"""PyTorch's tests of autocast on a GPU, with `perfuse.autocast`, and compiled training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import perfuse
from perfuse.precision.cast_cache import CASTS
from tests.harness.autocast import CastCounter, OwnLinear
from tests.harness.backend import compiled
from tests.harness.compare import norm_complaints


@pytest.fixture
def weight(device: str) -> Iterator[nn.Parameter]:
    CASTS.release()
    yield nn.Parameter(torch.randn(4, 3, device=device))
    assert CASTS.num_held() == 0


def casts_of_a_step(weight: nn.Parameter) -> int:
    x, device = torch.randn(2, 3, device=weight.device), weight.device.type
    with CastCounter(weight) as counter:
        with perfuse.autocast(device):
            loss = OwnLinear.apply(x, weight).sum()
        loss.backward()
    return counter.count


def test_forward_and_backward_share_a_cast(weight: nn.Parameter) -> None:
    assert casts_of_a_step(weight) == 1
    with torch.no_grad():
        weight.add_(1)
    assert casts_of_a_step(weight) == 1
    CASTS.release()


def test_tensors_that_cuda_graphs_update_are_not_cached(weight: nn.Parameter) -> None:
    try:
        torch._C._set_cached_tensors_enabled(True)
        torch._C._add_cached_tensor(weight)
        assert casts_of_a_step(weight) == 2
    finally:
        torch._C._set_cached_tensors_enabled(False)


class Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with perfuse.autocast(x.device.type, torch.bfloat16, policy={"gelu": "float32"}):
            return self.inner(x)


@pytest.mark.parametrize("place", ["around", "inside"])
def test_training_step(device: str, place: str) -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))
    module, x = nn.Sequential(*layers).to(device), torch.randn(33, 64, device=device)
    region = perfuse.autocast(device, torch.bfloat16) if place == "around" else nullcontext()
    candidate = module if place == "around" else Inside(module)

    def step(run: Callable[[Tensor], Tensor], region: Any) -> list[Tensor]:
        with region:
            result = run(x)
        gradients = torch.autograd.grad(result.float().square().mean(), list(module.parameters()))
        return [result.detach(), *gradients]

    eager, exact = step(candidate, region), step(module, nullcontext())
    got = step(compiled(candidate, fullgraph=True), region)
    assert not norm_complaints(got, eager, exact)


def test_a_training_step_casts_each_weight_once(device: str) -> None:
    """The peak does not hold a second copy, and the backward has no cast of a weight."""
    module = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to(device)
    x = torch.randn(64, 512, device=device)

    def run(x: Tensor) -> Tensor:
        with perfuse.autocast(device, torch.bfloat16):
            return module(x)

    backward = perfuse.explain(run, x).stage("graph").partition("(backward)")[2]
    casts = [line for line in backward.splitlines() if "_to_copy.default(primals" in line]
    assert not casts
