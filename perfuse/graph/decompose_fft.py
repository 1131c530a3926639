"""Fourier transforms with the strides that eager's MKL gives.

MKL's results are dense: the other dimensions in the order of the input's strides, then those that
are transformed. PyTorch 2.11 predicts other ones. Called on a view in that order, the op
returns what is predicted, and the result is the view back.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def fft_c2c(x: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    inner = [d % x.dim() for d in dim]
    return _in_order(aten._fft_c2c.default, x, inner, [], (normalization, forward))


def fft_r2c(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    *inner, halved = (d % x.dim() for d in dim)
    return _in_order(aten._fft_r2c.default, x, inner, [halved], (normalization, onesided))


def fft_c2r(x: Tensor, dim: Sequence[int], normalization: int, last_dim_size: Any) -> Any:
    *inner, halved = (d % x.dim() for d in dim)
    return _in_order(aten._fft_c2r.default, x, inner, [halved], (normalization, last_dim_size))


def _in_order(
    op: Any, x: Tensor, inner: list[int], halved: list[int], rest: tuple[Any, ...]
) -> Any:
    """The op on a view. The `halved` dimension, of whose spectrum half is stored, stays last."""
    if x.device.type != "cpu" or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return NotImplemented
    outermost_first = list(range(x.dim()))
    if not x.is_contiguous():  # comparing strides that are symbols sets guards
        outermost_first.sort(key=x.stride().__getitem__, reverse=True)
    others = [d for d in outermost_first if d not in (*inner, *halved)]
    transformed = [*sorted(inner, key=outermost_first.index), *halved]
    order = [*others, *transformed]
    if order == list(range(x.dim())):
        return NotImplemented
    made = op(x.permute(order), [order.index(d) for d in transformed], *rest)
    return made.permute([order.index(d) for d in range(x.dim())])
