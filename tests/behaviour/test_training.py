"""Modules and autograd: buffers, custom functions, several steps of an optimiser."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.behaviour.row import randn
from tests.harness.backend import compiled
from tests.harness.compare import assert_as_good_as_eager


class Cube(torch.autograd.Function):
    """A gradient of its own: three times the input, not its square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x


class Counter(nn.Module):
    """A buffer that every call moves: backward has to see the value that forward multiplied by,
    not recompute it from the buffer after the call has changed it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls  # type: ignore[no-any-return]


class ApplyCube(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.linear(x))  # type: ignore[no-any-return, no-untyped-call]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 3).long() % 11
        return F.linear(self.embedding(tokens).mean(1), self.embedding.weight)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch_norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 6, 6)),
    "batch_norm_no_momentum": (lambda: nn.BatchNorm1d(5, momentum=None), (8, 5)),
    "group_norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.GELU()), (2, 4, 5, 5)),
    "instance_norm": (
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        (2, 3, 5, 5),
    ),
    "buffer": (Counter, (4, 5)),
    "custom_function": (ApplyCube, (4, 5)),
    "tied_weights": (Tied, (3, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 5, 8)),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)), (2, 3, 8, 8)),
}


def train(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Three steps of plain descent: losses, then parameters and buffers as they ended."""
    losses = []
    for _ in range(3):
        loss = run(x).square().mean()
        parameters = [p for p in module.parameters() if p.requires_grad]
        if parameters:
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.05)
        losses.append(loss.detach())
    return [*losses, *(v.detach().clone() for v in module.state_dict().values())]


@pytest.mark.parametrize("name", MODULES)
def test_three_steps_match_eager(name: str) -> None:
    build, shape = MODULES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain, mine = build(), None
    mine, wide = copy.deepcopy(plain), copy.deepcopy(plain).double()
    x = randn(*shape)
    exact = train(wide, wide, x.double())
    eager = train(plain, plain, x)
    got = train(mine, compiled(mine), x)
    assert_as_good_as_eager(got, eager, exact)


def test_evaluation_after_training_uses_the_running_statistics() -> None:
    torch._dynamo.reset()
    plain = nn.BatchNorm1d(4)
    mine = copy.deepcopy(plain)
    candidate = compiled(mine)
    x = randn(16, 4) * 3 + 1
    plain(x), candidate(x)
    plain.eval(), mine.eval()
    wide = copy.deepcopy(plain).double()
    assert_as_good_as_eager(candidate(x), plain(x), wide(x.double()))
    assert mine.state_dict()["num_batches_tracked"] == 1


def test_inference_keeps_no_graph() -> None:
    torch._dynamo.reset()
    x = randn(3, grad=True)
    with torch.no_grad():
        assert not compiled(lambda t: t.exp())(x).requires_grad


def test_gradient_of_a_part_of_the_outputs() -> None:
    torch._dynamo.reset()
    x = randn(5, grad=True)
    first, second = compiled(lambda t: (t.exp(), t.sin()))(x)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    assert_as_good_as_eager(gradient, x.exp().detach(), x.double().exp().detach())
    assert second.requires_grad


def test_second_backward_needs_retain_graph() -> None:
    torch._dynamo.reset()
    x = randn(5, grad=True)
    y = compiled(lambda t: (t.exp() * t.sin()).sum())(x)
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
