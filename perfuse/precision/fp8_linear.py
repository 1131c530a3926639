"""A linear layer in FP8: e4m3 forward, e5m2 gradients, each operand quantised once.

    result = x @ weight.T,  x gradient = gradient @ weight,  weight gradient = gradient.T @ x

A matmul by FP8 units needs scales that are constant along the dimension it sums over. With a scale
for each row, those of x and weight vary along that dimension in the backward. There they are
multiplied into the gradient before it is quantised, which is exact (they are powers of two), so
that the FP8 values of the forward serve the backward too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from perfuse.precision.fp8_matmul import ROWS_MULTIPLE, block_matmul, block_values, scaled_matmul
from perfuse.precision.quantise import (
    E4M3,
    E5M2,
    Scaled,
    delayed_scale,
    quantise,
    quantise_blocks,
    quantise_rows,
    quantise_tensor,
    with_amax,
)
from perfuse.precision.recipe import BLOCK_SIZE, Scaling

Operands = tuple[Scaled, Scaled]  # x and weight
Gradients = tuple[Tensor | None, Tensor | None]  # of x and weight, where they are needed


class Needs(NamedTuple):
    """The dtypes of gradients; None where there is no need for one."""

    x: torch.dtype | None
    weight: torch.dtype | None


class Histories(NamedTuple):
    """The amax of earlier steps, the latest first: the state of delayed scaling."""

    operands: Tensor  # a row for x, and one for the weight
    gradient: Tensor


class Way(NamedTuple):
    """One kind of scaling: how it multiplies forward, and backward by the same FP8 values."""

    quantised: Callable[[Tensor, Tensor], Operands]
    result: Callable[[Operands, Tensor | None, torch.dtype], Tensor]
    gradients: Callable[[Tensor, Operands, Needs], Gradients]


def transposed(x: Scaled) -> Scaled:
    return Scaled(x.values.t(), x.scale.t())


def _scaled_result(operands: Operands, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    x, weight = operands
    # Gradients are summed with all bits: they are small differences, and there are many steps.
    return scaled_matmul(x, transposed(weight), dtype, bias, is_fast=True)


def _quantised_tensors(x: Tensor, weight: Tensor) -> Operands:
    return quantise_tensor(x, E4M3), quantise_tensor(weight, E4M3)


def _tensor_gradients(gradient: Tensor, operands: Operands, needs: Needs) -> Gradients:
    return _gradients_by(quantise_tensor(gradient, E5M2), operands, needs)


def _gradients_by(g: Scaled, operands: Operands, needs: Needs) -> Gradients:
    x, weight = operands
    return (
        None if needs.x is None else scaled_matmul(g, weight, needs.x),
        None if needs.weight is None else scaled_matmul(transposed(g), x, needs.weight),
    )


def _quantised_rows(x: Tensor, weight: Tensor) -> Operands:
    return quantise_rows(x, E4M3), quantise_rows(weight, E4M3)


def _row_gradients(gradient: Tensor, operands: Operands, needs: Needs) -> Gradients:
    """Gradients by rows, with the scales of the other operand inside: see the module."""
    x, weight = operands
    wide, for_x, for_weight = gradient.float(), None, None
    if needs.x is not None:
        g = quantise_rows(wide * weight.scale.t(), E5M2)
        for_x = scaled_matmul(g, _unscaled(weight), needs.x)
    if needs.weight is not None:
        g = quantise_rows((wide * x.scale).t(), E5M2)
        for_weight = scaled_matmul(g, _unscaled(x), needs.weight)
    return for_x, for_weight


def _unscaled(x: Scaled) -> Scaled:
    """The values alone, with ones as the scales of columns."""
    return Scaled(x.values, torch.ones_like(x.scale[:1]).expand(1, x.values.shape[1]))


def _quantised_blocks(x: Tensor, weight: Tensor) -> Operands:
    return (
        quantise_blocks(x, E4M3, 1, BLOCK_SIZE),
        quantise_blocks(weight, E4M3, BLOCK_SIZE, BLOCK_SIZE),
    )


def _block_result(operands: Operands, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    x, weight = operands
    return block_matmul(block_values(x), block_values(weight).t(), dtype, bias)


def _block_gradients(gradient: Tensor, operands: Operands, needs: Needs) -> Gradients:
    x, weight = operands
    g = block_values(quantise_blocks(gradient, E5M2, 1, BLOCK_SIZE))
    return (
        None if needs.x is None else block_matmul(g, block_values(weight), needs.x),
        None if needs.weight is None else block_matmul(g.t(), block_values(x), needs.weight),
    )


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        Scaling.TENSOR: Way(_quantised_tensors, _scaled_result, _tensor_gradients),
        Scaling.ROW: Way(_quantised_rows, _scaled_result, _row_gradients),
        Scaling.BLOCK: Way(_quantised_blocks, _block_result, _block_gradients),
    }
)


class Fp8Linear(torch.autograd.Function):
    """A linear layer with scales that are computed from the values they scale."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scaling: str, dtype: torch.dtype
    ) -> Tensor:
        way = WAYS[scaling]
        operands = way.quantised(x, weight)
        _save(ctx, operands, x, weight, bias)
        ctx.gradients = way.gradients
        return way.result(operands, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        operands, needs = _saved(ctx)
        with torch.autocast(gradient.device.type, enabled=False):
            made = ctx.gradients(gradient, operands, needs)
            return (*made, _bias_gradient(ctx, gradient), None, None)


class DelayedFp8Linear(torch.autograd.Function):
    """A linear layer with scales by the amax of earlier steps, which it keeps."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        histories: Histories,
        dtype: torch.dtype,
        keeps: bool,
    ) -> Tensor:
        rows = histories.operands.unbind()
        scaled = [_scaled_by(v, row, E4M3) for v, row in zip((x, weight), rows, strict=True)]
        operands = (scaled[0][0], scaled[1][0])
        if keeps:
            histories.operands.copy_(torch.stack([history for _, history in scaled]))
        _save(ctx, operands, x, weight, bias)
        ctx.history = histories.gradient
        return _scaled_result(operands, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        operands, needs = _saved(ctx)
        with torch.autocast(gradient.device.type, enabled=False):
            g, history = _scaled_by(gradient, ctx.history, E5M2)
            ctx.history.copy_(history)
            made = _gradients_by(g, operands, needs)
            return (*made, _bias_gradient(ctx, gradient), None, None, None)


def _scaled_by(x: Tensor, history: Tensor, dtype: torch.dtype) -> tuple[Scaled, Tensor]:
    """A tensor by the scale of its history, and the history after it."""
    amax = x.abs().amax().float()
    return quantise(x, delayed_scale(amax, history, dtype), dtype), with_amax(history, amax)


def _save(ctx: Any, operands: Operands, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    ctx.save_for_backward(*operands[0], *operands[1])
    ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)


def _saved(ctx: Any) -> tuple[Operands, Needs]:
    x, x_scale, weight, weight_scale = ctx.saved_tensors
    pairs = zip(ctx.dtypes[:2], ctx.needs_input_grad[:2], strict=True)
    needs = Needs(*(dtype if needed else None for dtype, needed in pairs))
    return (Scaled(x, x_scale), Scaled(weight, weight_scale)), needs


def _bias_gradient(ctx: Any, gradient: Tensor) -> Tensor | None:
    if not ctx.needs_input_grad[2]:
        return None
    return gradient.sum(0, dtype=torch.float32).to(ctx.dtypes[2])


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scaling: str,
    dtype: torch.dtype,
    operand_history: Tensor | None = None,
    gradient_history: Tensor | None = None,
) -> Tensor:
    """`F.linear` in FP8, with a result of `dtype`.

    Dynamo records the call as it is (`allow_in_graph`): AOTAutograd traces what is in it.
    """
    keeps = torch.is_grad_enabled()
    rows = x.reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    if x.device.type == "cuda" and num_rows % ROWS_MULTIPLE != 0:
        rows = F.pad(rows, (0, 0, 0, -num_rows % ROWS_MULTIPLE))
    with torch.autocast(x.device.type, enabled=False):
        if operand_history is None or gradient_history is None:
            result = _applied(Fp8Linear, rows, weight, bias, scaling, dtype)
        else:
            histories = Histories(operand_history, gradient_history)
            result = _applied(DelayedFp8Linear, rows, weight, bias, histories, dtype, keeps)
    return result[:num_rows].reshape(*x.shape[:-1], weight.shape[0])


def _applied(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


@cache
def allow_in_graph() -> None:
    """Have Dynamo record calls of `fp8_linear`; loads Dynamo, which takes seconds."""
    compiler: Any = torch.compiler
    compiler.allow_in_graph(fp8_linear)
