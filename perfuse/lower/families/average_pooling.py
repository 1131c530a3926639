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
from perfuse.ir.program import LoopKind
from perfuse.lower.builder import Builder
from perfuse.lower.families import pooling
from perfuse.lower.families.pooling import MOST_TAPS, PoolingWindow, covering, in_memory, summed
from perfuse.lower.families.views import all_inside, guarded, reindex_unchecked
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, cast_tensor, positions


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


def _average(builder: Builder, x: Tensor, divisor: Divisor) -> Tensor:
    if not x.dtype.is_float:
        raise CannotLower(f"average pooling of {x.dtype}")
    x, window = in_memory(builder, x), divisor.window
    shape = (*x.shape[: x.ndim - window.ndim], *window.outs)
    compute = x.dtype.compute
    if window.num_taps <= MOST_TAPS:
        total = summed(
            value for value, _, _ in pooling.taps(x, shape, window, ex.const(0, compute))
        )
    else:
        total = _tap_loop(builder, x, shape, window)
    by = ex.cast(divisor.at(positions(shape)[-window.ndim :]), compute)
    return Tensor(shape, x.dtype, ex.apply("div", total, by))


def _tap_loop(builder: Builder, x: Tensor, shape: tuple[Dim, ...], window: PoolingWindow) -> Expr:
    """The sum over the taps as a reduction over dimensions added behind the output's."""
    full = (*shape, *window.kernel)
    at = positions(full)
    lead = len(shape) - window.ndim
    steps = at[len(shape) :]
    where = [ix.add(window.start(d, at[lead + d]), step) for d, step in enumerate(steps)]
    wide = x.dtype.compute
    moved = reindex_unchecked(x, full, [*at[:lead], *where])
    value = guarded(moved.value, all_inside(where, window.sizes), ex.const(0, wide))
    reduced = range(len(shape), len(full))
    return builder.reduce(LoopKind.SUM, Tensor(full, wide, value), list(reduced), wide).value


def _average_backward(builder: Builder, grad: Tensor, x: Tensor, divisor: Divisor) -> Tensor:
    """Each input position sums the gradients of the windows over it."""
    spread = math.prod(divisor.window.reach)
    if spread > MOST_TAPS or not grad.dtype.is_float:
        raise CannotLower("gradient of average pooling with many windows per position")
    grad = in_memory(builder, grad) if spread > 1 else grad
    compute = grad.dtype.compute
    parts = []
    for read, where, mask in covering(grad, x.shape, divisor.window):
        # Outside of the mask the divisor may be anything but must not trap: it is a float.
        by = ex.cast(divisor.at(where), compute)
        part = ex.apply("div", read(grad), by)
        is_fixed = by.op == "const"
        parts.append(part if is_fixed else ex.apply("where", mask, part, ex.const(0, compute)))
    return Tensor(x.shape, grad.dtype, summed(parts))


def _divisor(
    x: Tensor,
    ndim: int,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> Divisor:
    window = pooling.window_of(x, ndim, kernel, stride, padding, 1, ceil_mode)
    return Divisor(window, count_include_pad, divisor_override)


def _average_pool(ndim: int) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor, *args: Any, **kw: Any) -> Tensor:
        return _average(builder, x, _divisor(x, ndim, *args, **kw))

    return lower


def _average_pool_backward(ndim: int) -> Callable[..., Tensor]:
    def lower(builder: Builder, grad: Tensor, x: Tensor, *args: Any, **kw: Any) -> Tensor:
        return _average_backward(builder, grad, x, _divisor(x, ndim, *args, **kw))

    return lower


for _ndim in (1, 2, 3):
    lowers(f"aten.avg_pool{_ndim}d.default")(_average_pool(_ndim))
for _ndim in (2, 3):
    lowers(f"aten.avg_pool{_ndim}d_backward.default")(_average_pool_backward(_ndim))


def _adaptive_divisor(x: Tensor, outs: Sequence[Any]) -> Divisor:
    """Of the plain window an adaptive pooling amounts to when the sizes divide."""
    sizes = x.shape[-len(outs) :]
    if not all(isinstance(n, int) for n in (*x.shape, *outs)):
        raise CannotLower("adaptive pooling of a dynamic size")
    pairs = [(int(n), int(o)) for n, o in zip(sizes, outs, strict=True)]  # type: ignore[arg-type]
    if any(o == 0 or n % o for n, o in pairs):
        raise CannotLower("adaptive pooling into windows of different sizes")
    kernel = [n // o for n, o in pairs]
    return _divisor(x, len(outs), kernel)


@lowers("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def adaptive_avg_pool(builder: Builder, x: Tensor, outs: Sequence[Any]) -> Tensor:
    return _average(builder, x, _adaptive_divisor(x, outs))


@lowers("aten._adaptive_avg_pool2d_backward.default")
def adaptive_avg_pool2d_backward(builder: Builder, grad: Tensor, x: Tensor) -> Tensor:
    divisor = _adaptive_divisor(x, grad.shape[-2:])
    return cast_tensor(_average_backward(builder, grad, x, divisor), x.dtype)
