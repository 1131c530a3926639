"""Compiled autograd: the whole backward, hooks and gradients of leaves included, is one graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import perfuse  # noqa: F401  (registers the backend where it is not installed)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0].cos() * 2


def steps(is_compiled: bool) -> list[Tensor]:
    """The losses and gradients of steps over several sizes, their backward compiled or not."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    model[0].weight.register_hook(lambda grad: grad + 1)

    def step(x: Tensor) -> Tensor:
        loss = Scaled.apply(model(x)).square().mean()
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    with torch._dynamo.config.patch(compiled_autograd=is_compiled):
        run = torch.compile(step, backend="perfuse") if is_compiled else step
        losses = [run(torch.ones(size, 6).cumsum(0).cos()) for size in (5, 4, 7)]
    return losses + [p.grad for p in model.parameters() if p.grad is not None]


def test_as_eager() -> None:
    got, eager = steps(True), steps(False)
    assert len(got) == len(eager) == 9
    torch.testing.assert_close(got, eager)
