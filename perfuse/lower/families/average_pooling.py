"""Average pooling, plain and adaptive, with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.lower.builder import Builder
from perfuse.lower.families.pooling import MOST_TAPS, PoolingWindow, covering, taps, window_of
from perfuse.lower.families.views import guarded, inside, reindex_unchecked
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, cast_tensor, positions

_CHEAP_COST = 2


@dataclass(frozen=True, slots=True)
class Divisor:
    """The divisor of a window's sum: a given number, or the number of positions it counts."""

    window: PoolingWindow
    include_padding: bool
    given: Any

    def at(self, outs: Sequence[Dim]) -> Expr:
        if self.given is not None:
            return ex.const(int(self.given), DType.I64)
        total = ex.const(1, DType.I64)
        for d, out in enumerate(outs):
            total = _product(total, self._length(d, self.window.start(d, out)))
        return total

    def _length(self, d: int, start: Dim) -> Expr:
        k, p, size = self.window.kernel[d], self.window.padding[d], self.window.sizes[d]
        low, high = ix.bounds(start)
        limit = size + p if self.include_padding else size
        fits = isinstance(high, int) and high + k <= limit
        if fits and (self.include_padding or ix.is_nonnegative(low)):
            return ex.const(k, DType.I64)
        end = ex.apply("min", ex.index_value(ix.add(start, k)), ex.const(limit, DType.I64))
        first = ex.index_value(start)
        if not self.include_padding:
            first = ex.apply("max", first, ex.const(0, DType.I64))
        return ex.apply("sub", end, first)


def _product(a: Expr, b: Expr) -> Expr:
    if a.op == "const" and b.op == "const":
        return ex.const(a.attr * b.attr, DType.I64)
    return ex.apply("mul", a, b)


def _average(builder: Builder, x: Tensor, window: PoolingWindow, divisor: Divisor) -> Tensor:
    if not x.dtype.is_float:
        raise CannotLower(f"average pooling of {x.dtype}")
    if x.value.cost > _CHEAP_COST:
        x = builder.realize(x)
    shape = (*x.shape[: x.ndim - window.ndim], *window.outs)
    compute = x.dtype.compute
    if window.num_taps <= MOST_TAPS:
        total = _tap_sum(x, shape, window)
    else:
        total = _tap_loop(builder, x, shape, window)
    by = ex.cast(divisor.at(positions(shape)[-window.ndim :]), compute)
    return Tensor(shape, x.dtype, ex.apply("div", total, by))


def _tap_sum(x: Tensor, shape: Sequence[Dim], window: PoolingWindow) -> Expr:
    zero = ex.const(0, x.dtype.compute)
    total: Expr | None = None
    for value, _, _ in taps(x, shape, window, zero):
        total = value if total is None else ex.apply("add", total, value)
    assert total is not None
    return total


def _tap_loop(builder: Builder, x: Tensor, shape: tuple[Dim, ...], window: PoolingWindow) -> Expr:
    """The sum over the taps as a reduction over dimensions added behind the output's."""
    full = (*shape, *window.kernel)
    at = positions(full)
    lead = len(shape) - window.ndim
    mask = ex.const(True, DType.BOOL)
    where: list[Dim] = []
    for d, size in enumerate(window.sizes):
        position = ix.add(window.start(d, at[lead + d]), at[len(shape) + d])
        mask = ex.apply("land", mask, inside(position, size))
        where.append(position)
    wide = x.dtype.compute
    moved = reindex_unchecked(x, full, [*at[:lead], *where])
    value = guarded(moved.value, mask, ex.const(0, wide))
    reduced = range(len(shape), len(full))
    return builder.reduce("sum", Tensor(full, wide, value), list(reduced), wide).value


def _average_pool(ndim: int) -> Callable[..., Tensor]:
    def lower(
        builder: Builder,
        x: Tensor,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: Any = None,
    ) -> Tensor:
        window = window_of(x, kernel, stride, padding, 1, ceil_mode, ndim)
        divisor = Divisor(window, count_include_pad, divisor_override)
        return _average(builder, x, window, divisor)

    return lower


def _average_pool_backward(ndim: int) -> Callable[..., Tensor]:
    def lower(
        builder: Builder,
        grad: Tensor,
        x: Tensor,
        kernel: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: Any,
    ) -> Tensor:
        window = window_of(x, kernel, stride, padding, 1, ceil_mode, ndim)
        divisor = Divisor(window, count_include_pad, divisor_override)
        return _average_backward(builder, grad, x.shape, window, divisor)

    return lower


lowers("aten.avg_pool1d.default")(_average_pool(1))
lowers("aten.avg_pool2d.default")(_average_pool(2))
lowers("aten.avg_pool3d.default")(_average_pool(3))
lowers("aten.avg_pool2d_backward.default")(_average_pool_backward(2))
lowers("aten.avg_pool3d_backward.default")(_average_pool_backward(3))


def _average_backward(
    builder: Builder,
    grad: Tensor,
    shape: tuple[Dim, ...],
    window: PoolingWindow,
    divisor: Divisor,
) -> Tensor:
    """Each input position sums the gradients of the windows over it."""
    spread = math.prod(-(-k // s) for k, s in zip(window.kernel, window.stride, strict=True))
    if spread > MOST_TAPS or not grad.dtype.is_float:
        raise CannotLower("gradient of average pooling with many windows per position")
    if grad.value.cost > _CHEAP_COST and spread > 1:
        grad = builder.realize(grad)
    compute = grad.dtype.compute
    total: Expr | None = None
    for read, where, mask in covering(grad, shape, window):
        # Outside of the mask the divisor may be anything but must not trap: it is a float.
        by = ex.cast(divisor.at(where), compute)
        part = ex.apply("div", read(grad), by)
        if by.op != "const":
            part = ex.apply("where", mask, part, ex.const(0, compute))
        total = part if total is None else ex.apply("add", total, part)
    assert total is not None
    return Tensor(shape, grad.dtype, total)


def _adaptive_window(x: Tensor, outs: Sequence[Any]) -> PoolingWindow:
    """The plain window an adaptive pooling amounts to when the sizes divide."""
    sizes = x.shape[-len(outs) :]
    if not all(isinstance(n, int) for n in (*x.shape, *outs)):
        raise CannotLower("adaptive pooling of a dynamic size")
    pairs = [(int(n), int(o)) for n, o in zip(sizes, outs, strict=True)]  # type: ignore[arg-type]
    if any(o == 0 or n % o for n, o in pairs):
        raise CannotLower("adaptive pooling into windows of different sizes")
    kernel = [n // o for n, o in pairs]
    return window_of(x, kernel, kernel, 0, 1, False, len(outs))


@lowers("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def adaptive_avg_pool(builder: Builder, x: Tensor, outs: Sequence[Any]) -> Tensor:
    window = _adaptive_window(x, outs)
    return _average(builder, x, window, Divisor(window, True, None))


@lowers("aten._adaptive_avg_pool2d_backward.default")
def adaptive_avg_pool2d_backward(builder: Builder, grad: Tensor, x: Tensor) -> Tensor:
    window = _adaptive_window(x, grad.shape[-2:])
    made = _average_backward(builder, grad, x.shape, window, Divisor(window, True, None))
    return cast_tensor(made, x.dtype)
