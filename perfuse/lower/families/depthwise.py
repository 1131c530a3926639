"""Depthwise convolutions of few points on a CPU, in channels-last: generated loops.

Each channel is convolved by itself, so lanes run along the channels and nothing is reused but what
is in cache. What is around them (a norm, an activation, a residual) is in the same kernel, and
small ones cost no library call, whose preparation takes longer than their work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import LoopKind, contiguous_strides
from perfuse.lower.builder import Builder
from perfuse.lower.families.pooling import (
    MOST_TAPS,
    PoolingWindow,
    covering,
    in_memory,
    summed,
    taps,
    window_of,
)
from perfuse.lower.families.views import all_inside, guarded, reindex_unchecked
from perfuse.lower.layout import dense_strides
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, positions, reindex

_LIBRARY = "convolutions use the library"
# Terms of one accumulator in the gradient of a weight.
_MOST_IN_SUM = 1024


def _window(builder: Builder, x: Tensor, weight: Tensor, rest: Sequence[Any]) -> PoolingWindow:
    """The window of a depthwise convolution of few points; raises CannotLower for others."""
    stride, padding, dilation, is_transposed, _, groups = rest
    if builder.is_gpu or x.ndim != 4 or x.dtype is not DType.F32 or weight.dtype is not x.dtype:
        raise CannotLower(_LIBRARY)
    channels, points = x.shape[1], (weight.shape[2], weight.shape[3])
    if is_transposed or not groups == channels == weight.shape[0] or channels == 1:
        raise CannotLower(_LIBRARY)
    if not all(isinstance(n, int) for n in (*x.shape, *points)):
        raise CannotLower("a convolution of a dynamic size")
    window = window_of(x, 2, points, stride, padding, dilation)
    if 0 in (*x.shape, *window.outs):
        raise CannotLower("a convolution without results")
    return window


def _check_few(num_taps: int) -> None:
    if num_taps > MOST_TAPS:
        raise CannotLower("a depthwise convolution of many points")


def _check_channels_last(traced: Sequence[Any]) -> None:
    if not all(t.is_contiguous(memory_format=torch.channels_last) for t in traced):
        raise CannotLower("a depthwise convolution that is not channels-last")


def _by_tap(builder: Builder, weight: Tensor) -> Tensor:
    """The weight in memory as [tap, tap, channel]: neighbouring lanes read neighbours."""
    channels, _, tall, wide = weight.shape
    at = positions((tall, wide, channels))
    shape = (tall, wide, channels)
    moved = reindex(weight, shape, [at[2], 0, at[0], at[1]])
    return builder.realize(moved, contiguous_strides(shape))


@lowers("aten.convolution.default")
def convolution(
    builder: Builder, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> Tensor:
    window = _window(builder, x, weight, rest)
    _check_few(window.num_taps)
    _check_channels_last(builder.arguments[:1])
    x, kernel = in_memory(builder, x), _by_tap(builder, weight)
    shape = (*x.shape[:2], *window.outs)
    channel = positions(shape)[1]
    steps = itertools.product(*(range(k) for k in window.kernel))
    zero = ex.const(0, x.dtype)
    parts = [
        ex.apply("mul", value, _weight_at(kernel, (*step, channel), shape))
        for step, (value, _, _) in zip(steps, taps(x, shape, window, zero), strict=True)
    ]
    if bias is not None:
        parts.append(reindex(bias, shape, [channel]).value)
    return Tensor(shape, x.dtype, summed(parts))


def _weight_at(kernel: Tensor, where: Sequence[Dim], shape: Sequence[Dim]) -> Expr:
    return reindex(kernel, shape, where).value


@lowers("aten.convolution_backward.default")
def convolution_backward(
    builder: Builder, grad: Tensor, x: Tensor, weight: Tensor, _: Any, *rest: Any
) -> tuple[Tensor | None, ...]:
    *spec, mask = rest
    window = _window(builder, x, weight, spec)
    if mask[0]:
        _check_few(math.prod(window.reach))
        if any(d != 1 for d in window.dilation):
            raise CannotLower("the gradient of a dilated convolution")
    _check_channels_last(builder.arguments[:2])
    grad = builder.realize(grad, dense_strides(builder.arguments[0], builder.symbols))
    return (
        _input_gradient(builder, grad, x, weight, window) if mask[0] else None,
        _weight_gradient(builder, grad, x, weight, window) if mask[1] else None,
        builder.reduce(LoopKind.SUM, grad, [0, 2, 3], grad.dtype) if mask[2] else None,
    )


def _input_gradient(
    builder: Builder, grad: Tensor, x: Tensor, weight: Tensor, window: PoolingWindow
) -> Tensor:
    """Each position of the input sums the windows over it."""
    kernel = _by_tap(builder, weight)
    at = positions(x.shape)
    zero = ex.const(0, grad.dtype)
    parts = []
    for read, where, mask in covering(grad, x.shape, window):
        starts = [window.start(d, out) for d, out in enumerate(where)]
        step = [ix.add(at[2 + d], ix.mul(start, -1)) for d, start in enumerate(starts)]
        factor = _guarded_weight(kernel, (*step, at[1]), x.shape, mask, zero)
        parts.append(ex.apply("mul", read(grad), factor))
    return Tensor(x.shape, grad.dtype, summed(parts))


def _guarded_weight(
    kernel: Tensor, where: Sequence[Dim], shape: Sequence[Dim], mask: Expr, zero: Expr
) -> Expr:
    return guarded(reindex_unchecked(kernel, shape, where).value, mask, zero)


def _weight_gradient(
    builder: Builder, grad: Tensor, x: Tensor, weight: Tensor, window: PoolingWindow
) -> Tensor:
    """For each tap, the products of the gradient and the input below the tap, summed.

    In two steps where there are many, so that no sum of one accumulator is long.
    """
    x = in_memory(builder, x, 1)
    batch, channels, tall, wide = grad.shape
    full = (*window.kernel, channels, batch, tall, wide)
    at = positions(full)
    image = (at[3], at[2])
    where = [
        ix.add(window.start(d, at[4 + d]), ix.mul(at[d], window.dilation[d])) for d in range(2)
    ]
    below = reindex_unchecked(x, full, [*image, *where])
    inside = guarded(below.value, all_inside(where, window.sizes), ex.const(0, x.dtype))
    value = ex.apply("mul", reindex(grad, full, [*image, at[4], at[5]]).value, inside)
    num_terms = ix.product((batch, tall, wide))
    is_long = not isinstance(num_terms, int) or num_terms > _MOST_IN_SUM
    steps = [[4, 5], [3]] if is_long else [[3, 4, 5]]
    total = Tensor(full, grad.dtype, value)
    for dims in steps:
        total = builder.reduce(LoopKind.SUM, total, dims, grad.dtype)
    mine = positions(weight.shape)
    return reindex(total, weight.shape, [mine[2], mine[3], mine[0]])
