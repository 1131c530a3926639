"""Reductions of a few steps, in float32 for half precision, cast once at the end."""

import math
from typing import Any

import torch
from torch import Tensor

from perfuse.graph.decompose_softmax import opmath
from perfuse.torch_compat.sizes import is_known_empty


def logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    acc = opmath(x) if x.is_floating_point() else x.to(torch.get_default_dtype())
    if is_known_empty(acc):  # amax has no identity: the sum of nothing is 0, its log -inf
        return torch.log(torch.sum(torch.exp(acc), dim, keepdim)).to(acc.dtype)
    # A maximum of infinity would make inf - inf: such rows are shifted by nothing, and stay inf.
    peak = torch.amax(acc, dim, keepdim=True)
    peak = torch.where(torch.abs(peak) == math.inf, torch.zeros_like(peak), peak)
    total = torch.log(torch.sum(torch.exp(acc - peak), dim, keepdim=True)) + peak
    kept = x.dtype if x.is_floating_point() else acc.dtype
    result = total.to(kept)
    return result if keepdim else torch.squeeze(result, list(dim) or list(range(x.dim())))


def vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if x.is_complex():
        return NotImplemented
    kept = dtype or x.dtype
    axes = list(dim or range(x.dim())) if x.dim() else []  # a scalar may be given an axis, too
    # One element is its own norm: a power of it could overflow. (A symbolic size does not count.)
    # It is neither cast nor reduced: x / |x| is 1 where both are rounded alike, and a backward
    # would save a reduction, rounded, and recompute x.
    if ord != 0 and all(isinstance(x.shape[d], int) and x.shape[d] == 1 for d in axes):
        size = torch.abs(x.to(kept))
        # A reduction's result is contiguous, whatever it reads.
        return (size if keepdim else torch.squeeze(size, axes)).contiguous()
    return _norm(opmath(x.to(kept)), ord, axes, keepdim).to(kept)


def _norm(x: Tensor, order: float, axes: list[int], keepdim: bool) -> Tensor:
    if order == 0:
        return torch.sum(torch.ne(x, 0), axes, keepdim, dtype=x.dtype)
    size = torch.abs(x)
    if order == math.inf:
        return torch.amax(size, axes, keepdim)
    if order == -math.inf:
        return torch.amin(size, axes, keepdim)
    if order == 1:
        return torch.sum(size, axes, keepdim)
    if order == 2:
        return torch.sqrt(torch.sum(x * x, axes, keepdim))
    return torch.pow(torch.sum(torch.pow(size, order), axes, keepdim), 1.0 / order)
