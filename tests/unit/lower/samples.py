"""Small seeded tensors for rows of tests."""

from __future__ import annotations

import torch
from torch import Tensor


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    seed = torch.Generator().manual_seed(sum(shape) * 31 + len(shape))
    if dtype is torch.bool:
        return torch.rand(shape, generator=seed) > 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=seed).to(dtype)
    low = 0 if dtype is torch.uint8 else -6
    return torch.randint(low, 7, shape, generator=seed).to(dtype)


def f32(*shape: int) -> Tensor:
    return _filled(shape, torch.float32)


def f64(*shape: int) -> Tensor:
    return _filled(shape, torch.float64)


def bf16(*shape: int) -> Tensor:
    return _filled(shape, torch.bfloat16)


def f16(*shape: int) -> Tensor:
    return _filled(shape, torch.float16)


def i64(*shape: int) -> Tensor:
    return _filled(shape, torch.int64)


def i32(*shape: int) -> Tensor:
    return _filled(shape, torch.int32)


def u8(*shape: int) -> Tensor:
    return _filled(shape, torch.uint8)


def mask(*shape: int) -> Tensor:
    return _filled(shape, torch.bool)


def ids(limit: int, *shape: int) -> Tensor:
    """Positions in [0, limit), repeated ones among them."""
    seed = torch.Generator().manual_seed(limit)
    return torch.randint(0, limit, shape, generator=seed)


def special(*shape: int) -> Tensor:
    """Floats with NaN, infinities and signed zeros among them."""
    made = f32(*shape)
    flat = made.view(-1)
    for i, value in enumerate((float("nan"), float("inf"), float("-inf"), 0.0, -0.0)):
        flat[i * 3 % flat.numel()] = value
    return made
