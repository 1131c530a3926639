"""Scatters into a tensor whose elements share memory: a copy of its own comes first.

Eager makes that copy too. PyTorch 2.11 forgets it while tracing and promises the result the strides
of the tensor, in which several elements would be one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perfuse.torch_compat import OpOverload


def _is_repeated(x: Tensor) -> bool:
    """Whether one element stands for several; sizes and strides that are symbols gain no guard."""
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
