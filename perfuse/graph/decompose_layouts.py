"""Results with the layout of their input, including channels-last; splits as slices."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from perfuse.torch_compat.tensors import memory_format_of


def lies_channels_last(x: Tensor) -> bool:
    """Whether a result is channels-last like `x`. Eager's GPU kernels make it contiguous."""
    return x.device.type == "cpu" and memory_format_of(x) is not torch.contiguous_format


def lying_as(x: Tensor, result: Tensor) -> Tensor:
    """`result` with the layout of eager's CPU kernels."""
    if not lies_channels_last(x):
        return result
    return result.contiguous(memory_format=memory_format_of(x))


def first_as_eager(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for batch norm whose first result has eager's strides: dense, channels last or not."""

    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        first, *others = rule(x, *args, **kwargs)
        return (first.contiguous(memory_format=memory_format_of(x)), *others)

    return decomposed


def padded(source: Callable[[Tensor, Any], Tensor]) -> Callable[..., Tensor]:
    """Padding by elements at positions of their own.

    It has eager's strides: on a CPU the layout of the input. Positions are looked up in all
    dimensions at once, on a CPU except in the one that is innermost in memory: there the edges are
    parts beside the input, whose rows are copied instead of gathered.
    """

    def decomposed(x: Tensor, padding: list[int]) -> Tensor:
        is_last = lies_channels_last(x)
        has_rows = x.device.type == "cpu" and not is_last and _are_counts(padding[:2])
        indices: list[Tensor | None] = [None] * x.dim()
        for i in range(int(has_rows), len(padding) // 2):
            steps = _steps(x, -1 - i, *padding[2 * i : 2 * i + 2])
            indices[-1 - i] = source(steps, x.shape[-1 - i]).view(-1, *[1] * (i - has_rows))
        is_looked_up = any(index is not None for index in indices)
        result: Tensor = torch.ops.aten._unsafe_index(x, indices) if is_looked_up else x
        if has_rows:
            result = _with_edges(result, source, *padding[:2])
        wanted = memory_format_of(x) if is_last else torch.contiguous_format
        return result.contiguous(memory_format=wanted)

    return decomposed


def _are_counts(numbers: list[int]) -> bool:
    return all(isinstance(n, int) and n >= 0 for n in numbers)


def _steps(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    return torch.arange(-before, x.shape[dim] + after, device=x.device)


def _with_edges(
    x: Tensor, source: Callable[[Tensor, Any], Tensor], before: int, after: int
) -> Tensor:
    """The rows with what is looked up for their two ends."""
    size = x.shape[-1]
    steps = (torch.arange(-before, 0, device=x.device), torch.arange(after, device=x.device) + size)
    left, right = (torch.index_select(x, -1, source(at, size)) for at in steps)
    parts = [left] * (before > 0) + [x] + [right] * (after > 0)
    return torch.cat(parts, -1)


def reflected(at: Tensor, size: Any) -> Tensor:
    folded: Tensor = size - 1 - (size - 1 - at.abs()).abs()
    return folded


def reflected_backward(gradient: Tensor, x: Tensor, padding: list[int]) -> Tensor:
    """Each dimension's edges are folded back: slices and flips, so that no index is looked up."""
    for i in range(len(padding) // 2):
        dim, (before, after) = gradient.dim() - 1 - i, padding[2 * i : 2 * i + 2]
        gradient = _folded(gradient, dim, x.shape[-1 - i], before, after)
    wanted = memory_format_of(x) if lies_channels_last(x) else torch.contiguous_format
    return gradient.contiguous(memory_format=wanted)


def _folded(gradient: Tensor, dim: int, size: Any, before: int, after: int) -> Tensor:
    """The gradient of one dimension: each edge, flipped, is added to the elements it repeats.

    Of a negative padding, the elements that it takes away get 0.
    """
    first, last = max(-before, 0), size - max(-after, 0)
    result = gradient.narrow(dim, max(before, 0), last - first)
    unpadded = [0, 0] * (gradient.dim() - 1 - dim)
    result = torch.constant_pad_nd(result, [*unpadded, first, size - last])
    if before > 0:
        edge = gradient.narrow(dim, 0, before).flip(dim)
        result = result + torch.constant_pad_nd(edge, [*unpadded, 1, size - 1 - before])
    if after > 0:
        edge = gradient.narrow(dim, gradient.shape[dim] - after, after).flip(dim)
        result = result + torch.constant_pad_nd(edge, [*unpadded, size - 1 - after, 1])
    return result


def replicated(at: Tensor, size: Any) -> Tensor:
    return at.clamp(0, size - 1)


def roll(x: Tensor, shifts: list[int], dims: list[int] | tuple[()] = ()) -> Any:
    """Channels last, the rows of memory are rolled. Otherwise the op stays whole.

    Eager puts two parts together; where one of them is empty, the result is contiguous.
    """
    if not dims or not lies_channels_last(x):
        return NotImplemented
    order = [0, *range(2, x.dim()), 1]
    moved = [order.index(d % x.dim()) for d in dims]
    rolled = torch.roll(x.permute(order), shifts, moved)
    rolled = rolled.permute([order.index(d) for d in range(x.dim())])
    is_whole = any(_is_multiple(s, x.shape[d]) for s, d in zip(shifts, dims, strict=True))
    return rolled.contiguous() if is_whole else rolled


def _is_multiple(shift: Any, size: Any) -> bool:
    """Whether a shift by a multiple of the size moves nothing; symbolic sizes get no guard."""
    if isinstance(shift, int) and shift == 0:
        return True
    return isinstance(shift, int) and isinstance(size, int) and size > 0 and shift % size == 0


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
