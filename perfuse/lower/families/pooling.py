"""Pooling windows: unrolled taps where they are few, a reduction over the taps where many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.lower.builder import Builder
from perfuse.lower.families.pointwise import op
from perfuse.lower.families.views import all_inside, guarded, inside, reindex_unchecked, reshape
from perfuse.lower.layout import dense_order, dense_strides
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, positions

# More taps than this in one formula cost more registers than a loop over them costs jumps.
MOST_TAPS = 25
_CHEAP_COST = 2


@dataclass(frozen=True, slots=True)
class PoolingWindow:
    """How a pooling window walks over the last `len(kernel)` dimensions of a tensor."""

    sizes: tuple[int, ...]
    outs: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.kernel)

    @property
    def num_taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def reach(self) -> list[int]:
        """By dimension, the number of windows that may cover a position."""
        return [-(-k // s) for k, s in zip(self.kernel, self.stride, strict=True)]

    def start(self, d: int, out: Dim) -> Dim:
        """Where the window of an output position begins in dimension d; may be in the padding."""
        return ix.add(ix.mul(out, self.stride[d]), -self.padding[d])


def window_of(
    x: Tensor,
    ndim: int,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> PoolingWindow:
    def spread(value: Any, default: Any = ()) -> tuple[int, ...]:
        values = list(value) if isinstance(value, list | tuple) else [value]
        values = values or list(default)
        return tuple(values * ndim if len(values) == 1 else values)

    sizes = x.shape[-ndim:]
    if not all(isinstance(s, int) and s > 0 for s in x.shape):
        raise CannotLower("pooling of a dynamic or empty size")
    k = spread(kernel)
    s, p, d = spread(stride, k), spread(padding, (0,)), spread(dilation, (1,))
    outs = tuple(_out_size(*dims, ceil_mode) for dims in zip(sizes, k, s, p, d, strict=True))
    return PoolingWindow(tuple(int(n) for n in sizes if isinstance(n, int)), outs, k, s, p, d)


def _out_size(size: Any, k: int, s: int, p: int, d: int, ceil_mode: bool) -> int:
    span = int(size) + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil_mode else 0)
    out = span // s + 1
    # The last window must begin inside the input or its left padding.
    return out - 1 if ceil_mode and (out - 1) * s >= int(size) + p else out


def taps(
    x: Tensor, shape: Sequence[Dim], window: PoolingWindow, fill: Expr
) -> Iterator[tuple[Expr, Expr, list[Dim]]]:
    """(value, mask, position in the last dimensions) of each tap, `fill` where it is outside."""
    lead = len(shape) - window.ndim
    at = positions(shape)
    starts = [window.start(d, at[lead + d]) for d in range(window.ndim)]
    for steps in itertools.product(*(range(k) for k in window.kernel)):
        where = [ix.add(s, t * d) for s, t, d in zip(starts, steps, window.dilation, strict=True)]
        mask = all_inside(where, window.sizes)
        moved = reindex_unchecked(x, shape, [*at[:lead], *where])
        yield guarded(moved.value, mask, fill), mask, where


def in_memory(builder: Builder, x: Tensor, place: int = 0) -> Tensor:
    """Each element is read by many windows: an expensive one is computed once.

    It has the layout of the argument at this place, as the result has it.
    """
    if x.value.cost <= _CHEAP_COST:
        return x
    return builder.realize(x, dense_strides(builder.arguments[place], builder.symbols))


def _laid_as_input(builder: Builder, shape: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """Strides of a result with the order of dimensions of the argument, as eager's.

    Those of size 1 too: by them, eager recognises a single image in channels-last format.
    """
    traced, symbols = builder.arguments[0], builder.symbols
    sizes, steps = symbols.dims(traced.shape), symbols.strides(traced.stride())
    order = dense_order(sizes, steps)
    if order is None:
        return None
    plain = list(range(len(sizes)))
    last = [0, *plain[2:], 1]
    is_last = len(sizes) > 3 and steps[1] == 1 and steps[-1] == sizes[1]
    ordered = [d for d in order if sizes[d] != 1]
    for usual in (plain, last) if is_last else (last, plain):  # the second goes before the first
        if [d for d in usual if sizes[d] != 1] == ordered:
            order = usual
    strides: dict[int, Dim] = {}
    step: Dim = 1
    for d in reversed(order):
        strides[d] = step
        step = ix.mul(step, shape[d])
    return tuple(strides[d] for d in range(len(shape)))


def _lowest(dtype: DType) -> Expr:
    if dtype.is_float:
        return ex.const(-math.inf, dtype.compute)
    return ex.const(-(1 << (8 * dtype.num_bytes - 1)) if dtype.is_signed else 0, dtype)


def _max_pool_with_indices(ndim: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def lower(builder: Builder, x: Tensor, *args: Any, **kw: Any) -> tuple[Tensor, Tensor]:
        return _max_pool(builder, x, window_of(x, ndim, *args, **kw))

    return lower


lowers("aten.max_pool2d_with_indices.default")(_max_pool_with_indices(2))
lowers("aten.max_pool3d_with_indices.default")(_max_pool_with_indices(3))


def _max_pool(builder: Builder, x: Tensor, window: PoolingWindow) -> tuple[Tensor, Tensor]:
    if window.num_taps > MOST_TAPS:
        raise CannotLower(f"max pooling over {window.num_taps} taps")
    if x.dtype is DType.BOOL:
        raise CannotLower("max pooling of bools")
    x = in_memory(builder, x)
    shape = (*x.shape[: x.ndim - window.ndim], *window.outs)
    best = _lowest(x.dtype)
    for value, _, _ in taps(x, shape, window, best):
        best = value if best is _lowest(x.dtype) else ex.apply("max", best, value)
    values = builder.realize(Tensor(shape, x.dtype, best), _laid_as_input(builder, shape))
    return values, Tensor(shape, DType.I64, _chosen_tap(x, values, window))


def _chosen_tap(x: Tensor, best: Tensor, window: PoolingWindow) -> Expr:
    """The flat input position of eager's tap: the first that holds the maximum, or the last NaN.

    Chosen among distances from the window's start, which fit 32 bits: half the vectors of 64.
    """
    starts = [window.start(d, at) for d, at in enumerate(positions(best.shape)[-window.ndim :])]
    start = ix.flat(window.sizes, starts)
    every = [
        (value, mask, _distance(ix.add(ix.flat(window.sizes, where), ix.mul(start, -1))))
        for value, mask, where in taps(x, best.shape, window, _lowest(x.dtype))
    ]
    *others, (_, _, found) = every
    for value, mask, here in reversed(others):
        same = ex.apply("eq", value, best.value)
        found = ex.apply("where", ex.apply("land", mask, same), here, found)
    for value, _, here in every if x.dtype.is_float else ():  # outside there is no NaN
        found = ex.apply("where", ex.apply("isnan", value), here, found)
    return ex.apply("add", ex.index_value(start), ex.cast(found, DType.I64))


def _distance(value: Dim) -> Expr:
    assert isinstance(value, int), "taps are at fixed places of a window"
    return ex.const(value, DType.I32)


def covering_windows(
    at: Sequence[Dim], window: PoolingWindow
) -> Iterator[tuple[list[Dim], list[Dim], Expr]]:
    """(position of the window, place within it, mask) of those that cover an input position."""
    for steps in itertools.product(*(range(r) for r in window.reach)):
        mask = ex.const(True, DType.BOOL)
        where: list[Dim] = []
        within: list[Dim] = []
        for d, step in enumerate(steps):
            shifted = ix.add(at[d], window.padding[d])
            out = ix.add(ix.floordiv(shifted, window.stride[d]), -step)
            mask = ex.apply("land", mask, inside(out, window.outs[d]))
            place = ix.add(at[d], ix.mul(window.start(d, out), -1))
            mask = ex.apply("land", mask, inside(place, window.kernel[d]))
            where.append(out)
            within.append(place)
        yield where, within, mask


def covering(
    grad: Tensor, shape: Sequence[Dim], window: PoolingWindow
) -> Iterator[tuple[Callable[[Tensor], Expr], list[Dim], Expr]]:
    """The windows that cover each input position: (read a tensor there, position, mask)."""
    lead = len(shape) - window.ndim
    at = positions(shape)
    for where, _, mask in covering_windows(at[lead:], window):

        def read(x: Tensor, where: list[Dim] = where, mask: Expr = mask) -> Expr:
            moved = reindex_unchecked(x, shape, [*at[:lead], *where])
            return guarded(moved.value, mask, ex.const(0, x.dtype.compute))

        yield read, where, mask


def summed(values: Iterable[Expr]) -> Expr:
    return reduce(op("add"), values)


@lowers("aten.max_pool2d_with_indices_backward.default")
def max_pool2d_with_indices_backward(
    builder: Builder, grad: Tensor, x: Tensor, *args: Any
) -> Tensor:
    """Each input position asks the windows over it whether it was their maximum."""
    *spec, indices = args
    window = window_of(x, 2, *spec)
    if any(d != 1 for d in window.dilation) or math.prod(window.reach) > MOST_TAPS:
        raise CannotLower("gradient of max pooling with dilation or many windows per position")
    laid = dense_strides(builder.arguments[len(args) + 1], builder.symbols)
    grad, indices = in_memory(builder, grad), builder.realize(indices, laid)
    at = positions(x.shape)
    own = ex.index_value(ix.flat(window.sizes, at[-2:]))
    zero = ex.const(0, grad.dtype.compute)
    parts = []
    for read, _, mask in covering(grad, x.shape, window):
        chosen = ex.apply("land", mask, ex.apply("eq", read(indices), own))
        parts.append(ex.apply("where", chosen, read(grad), zero))
    return Tensor(x.shape, grad.dtype, summed(parts))


@lowers("aten.im2col.default")
def im2col(
    builder: Builder, x: Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any
) -> Tensor:
    """The windows as columns: a row for each channel and tap."""
    window = window_of(x, 2, kernel, stride, padding, dilation)
    lead = x.ndim - 2
    full = (*x.shape[:lead], *window.kernel, *window.outs)
    at = positions(full)
    taps, outs = at[lead : lead + 2], at[lead + 2 :]
    where = [
        ix.add(window.start(d, outs[d]), ix.mul(taps[d], window.dilation[d])) for d in range(2)
    ]
    moved = reindex_unchecked(in_memory(builder, x), full, [*at[:lead], *where])
    zero = ex.cast(ex.const(0, DType.I64), moved.value.dtype)
    value = guarded(moved.value, all_inside(where, window.sizes), zero)
    rows = ix.mul(x.shape[lead - 1], window.num_taps)
    return reshape(
        builder, Tensor(full, x.dtype, value), [*x.shape[: lead - 1], rows, math.prod(window.outs)]
    )


@lowers("aten.col2im.default")
def col2im(
    builder: Builder, x: Tensor, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any
) -> Tensor:
    """Each position sums the taps of the windows over it."""
    lead = x.ndim - 2
    taps = math.prod(kernel)
    channels = ix.exact_div(x.shape[lead], taps)
    assert channels is not None, "col2im checks its sizes"
    shape = (*x.shape[:lead], channels, *size)
    window = window_of(Tensor(shape, x.dtype, x.value), 2, kernel, stride, padding, dilation)
    if any(d != 1 for d in window.dilation) or math.prod(window.reach) > MOST_TAPS:
        raise CannotLower("folding with dilation or many windows per position")
    full = [*shape[: lead + 1], *window.kernel, *window.outs]
    columns = reshape(builder, in_memory(builder, x), full)
    at = positions(shape)
    parts = []
    for where, within, mask in covering_windows(at[lead + 1 :], window):
        moved = reindex_unchecked(columns, shape, [*at[: lead + 1], *within, *where])
        parts.append(guarded(moved.value, mask, ex.const(0, moved.value.dtype)))
    return Tensor(shape, x.dtype, summed(parts))
