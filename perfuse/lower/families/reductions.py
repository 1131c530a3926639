"""Reductions: sums, products, extrema, their positions, any/all, variance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType, from_torch
from perfuse.ir.index import Dim
from perfuse.lower.builder import Builder
from perfuse.lower.families.pointwise import elementwise, op
from perfuse.lower.families.views import reshape
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, cast_tensor


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


def _sum_like(kind: str) -> Callable[..., Tensor]:
    def lower(
        builder: Builder, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> Tensor:
        result = accumulate_dtype(x, dtype)
        value = ex.cast(x.value, result)
        widened = Tensor(x.shape, result, value)
        return builder.reduce(kind, widened, dims_of(x, dim), result, keepdim)

    return lower


sum_over = _sum_like("sum")
lowers("aten.sum.dim_IntList")(sum_over)
lowers("aten.prod.dim_int")(_sum_like("prod"))


@lowers("aten.sum.default")
def sum_all(builder: Builder, x: Tensor, dtype: Any = None) -> Tensor:
    return sum_over(builder, x, None, False, dtype)


@lowers("aten.prod.default")
def prod_all(builder: Builder, x: Tensor, dtype: Any = None) -> Tensor:
    return _sum_like("prod")(builder, x, None, False, dtype)


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
    return elementwise(
        builder, [total], compute, total.dtype, lambda v: ex.apply("div", v, divisor)
    )


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
    return builder.reduce("sum", Tensor(x.shape, wide, ex.cast(x.value, wide)), dims, wide, keepdim)


def _correction(correction: Any, unbiased: Any) -> float:
    if correction is not None:
        return float(correction)
    return 0.0 if unbiased is False else 1.0


def variance(
    builder: Builder, x: Tensor, dim: Any, correction: float, keepdim: bool
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

    deviation = elementwise(builder, [x, average], wide, wide, op("sub"))
    square = elementwise(builder, [deviation], wide, wide, lambda d: ex.apply("mul", d, d))
    squares = builder.reduce("sum", square, dims, wide, True)
    exact = squares
    if not builder.is_gpu:  # a GPU's many short sums leave the mean nearly exact
        drift = builder.reduce("sum", deviation, dims, wide, True)
        lost = elementwise(
            builder, [drift, scaled_by_count(builder, drift, num)], wide, wide, op("mul")
        )
        exact = elementwise(
            builder, [squares, lost], wide, wide,
            lambda s, d: ex.apply("max", ex.apply("sub", s, d), ex.const(0, wide)),
        )  # fmt: skip
    var = scaled_by_count(builder, exact, num, correction)
    results = []
    for t in (var, average):
        t = cast_tensor(t, x.dtype)
        if not keepdim:
            t = reshape(builder, t, [s for i, s in enumerate(t.shape) if i not in dims])
        results.append(t)
    return results[0], results[1]


@lowers("aten.var.correction")
def var(
    builder: Builder, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    return variance(builder, x, dim, _correction(correction, None), keepdim)[0]


@lowers("aten.var_mean.correction")
def var_mean(
    builder: Builder, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return variance(builder, x, dim, _correction(correction, None), keepdim)


def _extremum(kind: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
        dims = dims_of(x, dim)
        if any(x.shape[d] == 0 for d in dims):
            raise CannotLower(f"{kind} over an empty dimension")
        if x.dtype is DType.BOOL:
            return builder.reduce("any" if kind == "max" else "all", x, dims, x.dtype, keepdim)
        return builder.reduce(kind, x, dims, x.dtype, keepdim)

    return lower


lowers("aten.amax.default")(_extremum("max"))
lowers("aten.amin.default")(_extremum("min"))


@lowers("aten.max.default")
def max_all(builder: Builder, x: Tensor) -> Tensor:
    return _extremum("max")(builder, x)


@lowers("aten.min.default")
def min_all(builder: Builder, x: Tensor) -> Tensor:
    return _extremum("min")(builder, x)


def _position(kind: str) -> Callable[..., Tensor]:
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


lowers("aten.argmax.default")(_position("argmax"))
lowers("aten.argmin.default")(_position("argmin"))


def _with_position(kind: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def lower(
        builder: Builder, x: Tensor, dim: int, keepdim: bool = False
    ) -> tuple[Tensor, Tensor]:
        if x.value.cost > 2:
            x = builder.realize(x)
        values = _extremum(kind)(builder, x, dim, keepdim)
        return values, _position(f"arg{kind}")(builder, x, dim, keepdim)

    return lower


lowers("aten.max.dim")(_with_position("max"))
lowers("aten.min.dim")(_with_position("min"))


def _truth(kind: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        result = DType.U8 if x.dtype is DType.U8 else DType.BOOL
        truth = Tensor(x.shape, DType.BOOL, ex.cast(x.value, DType.BOOL))
        found = builder.reduce(kind, truth, dims_of(x, dim), DType.BOOL, keepdim)
        return cast_tensor(found, result)

    return lower


lowers("aten.any.default", "aten.any.dim", "aten.any.dims")(_truth("any"))
lowers("aten.all.default", "aten.all.dim", "aten.all.dims")(_truth("all"))
