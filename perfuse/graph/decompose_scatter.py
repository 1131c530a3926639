"""Scatters into a tensor whose elements share memory: a copy of its own comes first.

Eager makes that copy too. PyTorch 2.11 omits it while tracing and gives the result the strides of
the tensor, in which several elements would be one. `index_fill` is an `index_put` of one value.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perfuse.torch_compat.ops import OpOverload

aten = torch.ops.aten


def _is_repeated(x: Tensor) -> bool:
    """Whether one element stands for several; symbolic sizes and strides get no guard."""
    pairs = zip(x.shape, x.stride(), strict=True)
    return any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size <= 1)
        for size, stride in pairs
    )


def into_own_copy(op: OpOverload) -> Callable[..., Any]:
    """The rule for a scatter `op`, which leaves it whole where no element is repeated."""

    def scatter(x: Tensor, *rest: Any, **named: Any) -> Any:
        return op(torch.clone(x), *rest, **named) if _is_repeated(x) else NotImplemented

    return scatter


def index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """With eager's strides; PyTorch's formula copies in place, which tracing in 2.11 refuses."""
    if index.dim() > 1:
        raise RuntimeError(f"index_fill: index must be a vector, got {index.dim()} dimensions")
    if index.dtype is not torch.int64:
        raise IndexError(f"index_fill: index must be int64, got {index.dtype}")
    if not isinstance(value, Tensor):
        filling = torch.scalar_tensor(value, dtype=x.dtype, device=x.device)
    elif value.dim() or (value.is_complex() and not x.is_complex()):
        raise RuntimeError(f"index_fill: value must be a scalar that {x.dtype} can hold")
    else:
        filling = value.to(x.device, x.dtype)
    if x.dim() == 0:
        return index_fill(x.unsqueeze(0), dim, index, filling).squeeze(0).clone()
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"index_fill: dimension {dim} of a tensor with {x.dim()}")
    places = [None] * (dim % x.dim()) + [index.reshape(-1)]
    filled: Tensor = aten.index_put.default(x, places, filling)
    return filled
