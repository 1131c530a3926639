"""Reductions: sums, products, extrema, their positions, any/all, variance; running sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType, from_torch
from perfuse.ir.index import Dim
from perfuse.ir.program import Loop, LoopKind
from perfuse.lower.builder import Builder, axes_over
from perfuse.lower.families.pointwise import elementwise, op
from perfuse.lower.families.views import reshape
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, cast_tensor, positions


def dims_of(x: Tensor, dim: Any) -> list[int]:
    """Dimensions to reduce: all of them for None or an empty list."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(x.ndim))
    chosen = dim if isinstance(dim, list | tuple) else [dim]
    return [d % x.ndim for d in chosen] if x.ndim else []


def accumulate_dtype(x: Tensor, dtype: Any) -> DType:
    if dtype is not None:
        found = from_torch(dtype)
        if found is None:
            raise CannotLower(f"accumulation in {dtype}")
        return found
    return x.dtype if x.dtype.is_float else DType.I64


def _sum_like(kind: LoopKind) -> Callable[..., Tensor]:
    def lower(
        builder: Builder, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> Tensor:
        result = accumulate_dtype(x, dtype)
        widened = Tensor(x.shape, result, ex.cast(x.value, result))
        chosen = _OF_TRUTHS[kind] if result is DType.BOOL else kind
        return builder.reduce(chosen, widened, dims_of(x, dim), result, keepdim)

    return lower


# What a sum and a product are in booleans.
_OF_TRUTHS = {LoopKind.SUM: LoopKind.ANY, LoopKind.PROD: LoopKind.ALL}
sum_over = _sum_like(LoopKind.SUM)
lowers("aten.sum.default", "aten.sum.dim_IntList")(sum_over)
lowers("aten.prod.default", "aten.prod.dim_int")(_sum_like(LoopKind.PROD))


def count(x: Tensor, dims: Sequence[int]) -> Dim:
    return ix.product([x.shape[d] for d in dims])


def scaled_by_count(builder: Builder, total: Tensor, num: Dim, less: float = 0) -> Tensor:
    """total / max(num - less, 0), exactly as a float division."""
    compute = total.dtype.compute
    if isinstance(num, int):
        divisor = ex.cast(ex.const(max(num - less, 0), DType.F64), compute)
    else:
        number = ex.cast(ex.index_value(num), compute)
        divisor = ex.apply("sub", number, ex.const(less, compute))
        divisor = ex.apply("max", divisor, ex.const(0, compute))
    return elementwise(builder, [total], total.dtype, lambda v: ex.apply("div", v, divisor))


@lowers("aten.mean.dim", "aten.mean.default")
def mean(
    builder: Builder, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    dims = dims_of(x, dim)
    result = accumulate_dtype(x, dtype)
    total = _wide_sum(builder, x, dims, keepdim, result)
    return cast_tensor(scaled_by_count(builder, total, count(x, dims)), result)


def _wide_sum(builder: Builder, x: Tensor, dims: list[int], keepdim: bool, like: DType) -> Tensor:
    """A sum kept in float32 for small floats, so that a mean is rounded once."""
    wide = like.compute
    widened = Tensor(x.shape, wide, ex.cast(x.value, wide))
    return builder.reduce(LoopKind.SUM, widened, dims, wide, keepdim)


@lowers("aten.var_mean.correction")
def variance(
    builder: Builder, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """(var, mean) in two sweeps: exact about large means, and the rows are in cache anyway.

    The second sweep also sums the deviations: what the rounded mean is off by goes out again.
    """
    dims = dims_of(x, dim)
    if x.value.cost > 2:
        x = builder.realize(x)
    wide = x.dtype.compute
    num = count(x, dims)
    total = _wide_sum(builder, x, dims, True, x.dtype)
    average = builder.realize(scaled_by_count(builder, total, num))

    deviation = elementwise(builder, [x, average], wide, op("sub"))
    square = elementwise(builder, [deviation], wide, lambda d: ex.apply("mul", d, d))
    squares = builder.reduce(LoopKind.SUM, square, dims, wide, True)
    if not builder.is_gpu:  # a GPU's many short sums leave the mean nearly exact
        drift = builder.reduce(LoopKind.SUM, deviation, dims, wide, True)
        lost = elementwise(builder, [drift, scaled_by_count(builder, drift, num)], wide, op("mul"))
        rest = elementwise(builder, [squares, lost], wide, op("sub"))
        squares = elementwise(
            builder, [rest], wide, lambda r: ex.apply("max", r, ex.const(0, wide))
        )
    var = scaled_by_count(builder, squares, num, 1.0 if correction is None else float(correction))
    shape = [s for i, s in enumerate(var.shape) if keepdim or i not in dims]
    results = [reshape(builder, cast_tensor(t, x.dtype), shape) for t in (var, average)]
    return results[0], results[1]


@lowers("aten.var.correction")
def var(builder: Builder, x: Tensor, dim: Any = None, **kw: Any) -> Tensor:
    return variance(builder, x, dim, **kw)[0]


def _extremum(kind: LoopKind) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
        dims = dims_of(x, dim)
        if any(x.shape[d] == 0 for d in dims):
            raise CannotLower(f"{kind} over an empty dimension")
        if x.dtype is DType.BOOL:
            truth = LoopKind.ANY if kind is LoopKind.MAX else LoopKind.ALL
            return builder.reduce(truth, x, dims, x.dtype, keepdim)
        return builder.reduce(kind, x, dims, x.dtype, keepdim)

    return lower


def _position(kind: LoopKind) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        if x.dtype is DType.BOOL:
            x = cast_tensor(x, DType.U8)
        if dim is None:
            keep = keepdim and x.ndim
            flat = reshape(builder, x, [x.numel])
            found = builder.reduce(kind, flat, [0], DType.I64)
            return reshape(builder, found, [1] * x.ndim) if keep else found
        return builder.reduce(kind, x, dims_of(x, dim), DType.I64, keepdim)

    return lower


def _with_position(kind: LoopKind, position: LoopKind) -> Callable[..., tuple[Tensor, Tensor]]:
    def lower(
        builder: Builder, x: Tensor, dim: int, keepdim: bool = False
    ) -> tuple[Tensor, Tensor]:
        if x.value.cost > 2:
            x = builder.realize(x)
        values = _extremum(kind)(builder, x, dim, keepdim)
        return values, _position(position)(builder, x, dim, keepdim)

    return lower


for _kind, _at in ((LoopKind.MAX, LoopKind.ARGMAX), (LoopKind.MIN, LoopKind.ARGMIN)):
    lowers(f"aten.a{_kind}.default", f"aten.{_kind}.default")(_extremum(_kind))
    lowers(f"aten.{_at}.default")(_position(_at))
    lowers(f"aten.{_kind}.dim")(_with_position(_kind, _at))


def _truth(kind: LoopKind) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        result = DType.U8 if x.dtype is DType.U8 else DType.BOOL
        truth = Tensor(x.shape, DType.BOOL, ex.cast(x.value, DType.BOOL))
        found = builder.reduce(kind, truth, dims_of(x, dim), DType.BOOL, keepdim)
        return cast_tensor(found, result)

    return lower


def _scan(kind: LoopKind) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
        result = accumulate_dtype(x, dtype)
        if x.ndim == 0 or x.shape[dim] == 1 or any(size == 0 for size in x.shape):
            return cast_tensor(x, result)
        along = f"d{dim % x.ndim}"
        axes = sorted(axes_over(x.shape), key=lambda axis: axis.name == along)
        buffer = builder.new_buffer(result, x.shape)
        index = buffer.index(positions(x.shape))
        value = ex.cast(x.value, result)
        builder.nodes.append(Loop(buffer.name, tuple(axes), kind, value, index, builder.origin))
        return builder.tensor_of(buffer)

    return lower


for _kind in (LoopKind.ANY, LoopKind.ALL):
    lowers(*(f"aten.{_kind}.{o}" for o in ("default", "dim", "dims")))(_truth(_kind))
for _kind in (LoopKind.CUMSUM, LoopKind.CUMPROD):
    lowers(f"aten.{_kind}.default")(_scan(_kind))
