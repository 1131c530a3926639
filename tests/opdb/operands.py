"""Where the operands of a sample are in memory.

`dense`: each starts its own storage. `offset`: each is a window at an odd offset in a larger one.
`strided`: the window has gaps, and its dimensions in reverse order. `made`: each is computed in the
program, so that ATen calls get the program's temporaries, which may share their memory with others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

OPERANDS = ("dense", "offset", "strided", "made")
_BEFORE, _AFTER = 5, 3  # elements of the storage around a window


def placed(tree: Any, operands: str) -> Any:
    """The same values in other places; a tensor that occurs twice stays one tensor."""
    memo: dict[int, Tensor] = {}
    place = {"offset": _at_offset, "strided": _with_gaps}.get(operands)

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor) or place is None or x.layout is not torch.strided:
            return x
        if id(x) not in memo:
            window = place(x.detach()).detach()
            memo[id(x)] = window.requires_grad_(x.requires_grad)
        return memo[id(x)]

    return pytree.tree_map(moved, tree)


def _at_offset(x: Tensor) -> Tensor:
    dense = x.resolve_conj().resolve_neg().contiguous().reshape(-1)
    memory = torch.cat([_noise(x, _BEFORE), dense, _noise(x, _AFTER)])
    return memory[_BEFORE : _BEFORE + x.numel()].view(x.shape)


def _with_gaps(x: Tensor) -> Tensor:
    if x.dim() == 0 or x.numel() == 0:
        return _at_offset(x)
    turned = x.resolve_conj().resolve_neg().permute(*reversed(range(x.dim()))).contiguous()
    spread = torch.stack([turned, _noise(x, x.numel()).view(turned.shape)], -1)
    window = _at_offset(spread)[..., 0]
    return window.permute(*reversed(range(x.dim())))


def _noise(x: Tensor, count: int) -> Tensor:
    """A value that no op may read: NaN, or the largest number."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return x.new_full((count,), float("nan"))
    largest = True if x.dtype is torch.bool else torch.iinfo(x.dtype).max
    return x.new_full((count,), largest)


def on_made_operands(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on operands that the program computes first, by a choice nobody can foresee."""
    is_kept = torch.tensor(True)

    def call(*args: Any, **kwargs: Any) -> Any:
        def made(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.layout is not torch.strided:
                return x
            return torch.where(is_kept.to(x.device), x, torch.zeros_like(x))

        args, kwargs = pytree.tree_map(made, (args, kwargs))
        return function(*args, **kwargs)

    return call
