"""Parts of tests of autocast: casts that are counted, and a function with a region of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import perfuse


class CastCounter(TorchDispatchMode):
    """Counts the casts of one weight, in all threads."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.count = weight, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0] is self.weight:
            self.count += 1
        return func(*args, **(kwargs or {}))


class OwnLinear(torch.autograd.Function):
    """A linear layer whose backward, in a thread of autograd's, has a region of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        with perfuse.autocast(x.device.type):
            return torch.matmul(gradient, w), torch.matmul(x.t(), gradient).t()
