"""Results that lie as their input does: channels last, where that is how it lies."""

from typing import Any

import torch
from torch import Tensor

from perfuse.torch_compat import memory_format_of


def lies_channels_last(x: Tensor) -> bool:
    """Whether a result lies channels last with `x`. Eager's kernels for GPUs make it contiguous."""
    return x.device.type == "cpu" and memory_format_of(x) is not torch.contiguous_format


def lying_as(x: Tensor, result: Tensor) -> Tensor:
    """`result` as eager's CPU kernels lay it out."""
    if not lies_channels_last(x):
        return result
    return result.contiguous(memory_format=memory_format_of(x))


def roll(x: Tensor, shifts: list[int], dims: list[int] | tuple[()] = ()) -> Any:
    """Channels last, the rows of memory are rolled. Otherwise the op stays whole."""
    if not dims or not lies_channels_last(x):
        return NotImplemented
    order = [0, *range(2, x.dim()), 1]
    moved = [order.index(d % x.dim()) for d in dims]
    rolled = torch.roll(x.permute(order), shifts, moved)
    return rolled.permute([order.index(d) for d in range(x.dim())])
