"""Results laid out as their input is, channels last included; splits as slices."""

import itertools
from collections.abc import Callable, Sequence
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


def first_as_eager(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for batch norm whose first result has eager's strides: dense, channels last or not."""

    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        first, *others = rule(x, *args, **kwargs)
        return (first.contiguous(memory_format=memory_format_of(x)), *others)

    return decomposed


def roll(x: Tensor, shifts: list[int], dims: list[int] | tuple[()] = ()) -> Any:
    """Channels last, the rows of memory are rolled. Otherwise the op stays whole."""
    if not dims or not lies_channels_last(x):
        return NotImplemented
    order = [0, *range(2, x.dim()), 1]
    moved = [order.index(d % x.dim()) for d in dims]
    rolled = torch.roll(x.permute(order), shifts, moved)
    return rolled.permute([order.index(d) for d in range(x.dim())])


# PyTorch's own formulas of the next three hold the storage offset of a traced input, which nothing
# guards: the next call may pass one at another offset.


def split(x: Tensor, size: int, dim: int = 0) -> Any:
    total = x.shape[dim]
    if isinstance(size, int) and size <= 0:
        return NotImplemented
    num_parts = max(int((total + size - 1) // size), 1)
    sizes = [size] * (num_parts - 1) + [total - size * (num_parts - 1)]
    return split_with_sizes(x, sizes, dim)


def split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> Any:
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(x.narrow(dim, at, size) for at, size in zip(starts, sizes, strict=False))


def narrow_copy(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)
