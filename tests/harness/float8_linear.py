"""A linear layer that trains in float8 with scales of whole tensors, as libraries write it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.harness.float8 import E4M3, E5M2


def quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in eight bits, and what to multiply it by to have it back."""
    limit = torch.finfo(dtype).max
    scale = (limit / x.abs().max().double().clamp(min=1e-12)).float()
    return (x.float() * scale).clamp(-limit, limit).to(dtype), scale.reciprocal()


def scaled_mm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """a @ b, with b's columns contiguous, as GPUs ask for."""
    columns = b if b.stride(0) == 1 else b.t().contiguous().t()
    rows = a if a.stride(1) == 1 else a.contiguous()
    return torch._scaled_mm(rows, columns, scale_a, scale_b, out_dtype=torch.bfloat16)


class Float8Linear(torch.autograd.Function):
    """x @ weight.T; gradients have fewer bits of precision and more of range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        small, scale = quantised(x, E4M3)
        small_weight, weight_scale = quantised(weight.t(), E4M3)
        rows = small.reshape(-1, x.shape[-1])
        return scaled_mm(rows, scale, small_weight, weight_scale).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        small, scale = quantised(rows, E5M2)
        small_weight, weight_scale = quantised(weight.t(), E4M3)
        small_x, x_scale = quantised(x.reshape(-1, x.shape[-1]), E4M3)
        grad_x = scaled_mm(small, scale, small_weight.t(), weight_scale).reshape(x.shape)
        return grad_x, scaled_mm(small.t(), scale, small_x, x_scale)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = Float8Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


def mlp(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """RMS norm and a gated MLP: backwards transpose what norms and activations gave."""
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), norm)
    return x + linear(torch.nn.functional.silu(linear(y, gate)) * linear(y, up), down)


def mlp_inputs(num_tokens: int, width: int, hidden: int) -> list[Tensor]:
    shapes = ((2, num_tokens // 2, width), (width,), *[(hidden, width)] * 2, (width, hidden))
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]
    return [tensor.bfloat16().requires_grad_() for tensor in made]
