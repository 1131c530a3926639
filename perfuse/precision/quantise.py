"""Floats -> FP8 values and scales. Scales are powers of two, so that scaling itself is exact."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST: Mapping[torch.dtype, float] = MappingProxyType({E4M3: 448.0, E5M2: 57344.0})
# Below any amax that matters: the scale of zeros, whose reciprocal must be finite.
LEAST_AMAX = 1e-12
# A cast to float8_e8m0fnu rounds to the nearest power of two. This factor makes it the next
# greater one: just below 3/2, so that powers of two stay what they are.
_ROUNDS_UP = 1.4999998


class Scaled(NamedTuple):
    """FP8 values, and the powers of two that they are to be multiplied by."""

    values: Tensor
    scale: Tensor


def scale_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The least power of two by which values up to `amax` fit into the dtype."""
    ratio = amax.float().clamp(min=LEAST_AMAX) / LARGEST[dtype]
    return (ratio * _ROUNDS_UP).to(torch.float8_e8m0fnu).float()


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Scaled:
    """`x` in units of `scale`, saturated and rounded once."""
    largest = LARGEST[dtype]
    values = (x.float() * scale.reciprocal()).clamp(-largest, largest).to(dtype)
    return Scaled(values, scale)


def quantise_tensor(x: Tensor, dtype: torch.dtype) -> Scaled:
    """One scale for the whole tensor."""
    return quantise(x, scale_for(x.abs().amax(), dtype), dtype)


def quantise_rows(x: Tensor, dtype: torch.dtype) -> Scaled:
    """A scale for each row."""
    return quantise(x, scale_for(x.abs().amax(1, keepdim=True), dtype), dtype)


def quantise_blocks(x: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Scaled:
    """A scale for each block of rows x columns; scales are 4-dimensional, as `blocked` views."""
    blocks = blocked(x, rows, columns)
    scale = scale_for(blocks.abs().amax((1, 3), keepdim=True), dtype)
    return Scaled(unblocked(quantise(blocks, scale, dtype).values), scale)


def dequantised_blocks(x: Scaled, dtype: torch.dtype) -> Tensor:
    """The values of a tensor with scales for blocks: exact in bfloat16 and float32."""
    num_rows, num_columns = x.scale.shape[0], x.scale.shape[2]
    rows, columns = x.values.shape[0] // num_rows, x.values.shape[1] // num_columns
    return unblocked(blocked(x.values, rows, columns).float() * x.scale).to(dtype)


def blocked(x: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix as (row of blocks, row in it, column of blocks, column in it)."""
    num_rows, num_columns = x.shape[0] // rows, x.shape[1] // columns
    return x.reshape(num_rows, rows, num_columns, columns)


def unblocked(x: Tensor) -> Tensor:
    return x.flatten(2).flatten(0, 1)


def delayed_scale(amax: Tensor, history: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale from a history of amax, or from this step's own amax if that would overflow."""
    earlier = history.amax().float()
    expected = scale_for(earlier, dtype)
    is_usable = (earlier > 0) & (amax <= expected * LARGEST[dtype])
    return torch.where(is_usable, expected, scale_for(amax, dtype))


def with_amax(history: Tensor, amax: Tensor) -> Tensor:
    """The history after one more step; what is not finite says nothing about the next one."""
    latest = torch.where(amax.isfinite(), amax, 0.0).to(history.dtype)
    return torch.cat([latest.reshape(1), history[:-1]])
