"""Ops that fit no other family: decimals, real angles, primitives of formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.lower.builder import Builder
from perfuse.lower.families.pointwise import element, elementwise
from perfuse.lower.families.reductions import sum_over, variance
from perfuse.lower.families.views import alias, permute, squeeze
from perfuse.lower.promotion import promote
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, positions, reindex


@lowers("aten.round.decimals")
def round_decimals(builder: Builder, x: Tensor, *, decimals: int) -> Tensor:
    if not x.dtype.is_float:
        raise CannotLower("rounding integers to decimals")
    scale = ex.cast(ex.const(10.0 ** abs(decimals), DType.F64), x.dtype)
    there, back = ("mul", "div") if decimals > 0 else ("div", "mul")

    def formula(value: Expr) -> Expr:
        return ex.apply(back, ex.apply("round", ex.apply(there, value, scale)), scale)

    return elementwise(builder, [x], x.dtype, formula)


@lowers("aten.ldexp.Tensor")
def ldexp(builder: Builder, x: Tensor, exponent: Tensor) -> Tensor:
    dtype = promote(x, exponent, int_to_float=True)

    def formula(a: Expr, b: Expr) -> Expr:
        return ex.apply("mul", a, ex.apply("exp2", b))

    return elementwise(builder, [x, exponent], dtype, formula)


@lowers("aten.angle.default")
def angle(builder: Builder, x: Tensor) -> Tensor:
    """Of a real number: pi if it is negative, else 0; NaN stays."""
    dtype = promote(x, int_to_float=True)

    def formula(value: Expr) -> Expr:
        zero, half_turn = ex.const(0, value.dtype), element(math.pi, value.dtype)
        turned = ex.apply("where", ex.apply("lt", value, zero), half_turn, zero)
        return ex.apply("where", ex.apply("isnan", value), value, turned)

    return elementwise(builder, [x], dtype, formula)


# -- primitives that PyTorch's reference formulas are made of ------------------------------------

lowers("prims.view_of.default")(alias)
lowers("prims.transpose.default")(permute)
lowers("prims.squeeze.default")(squeeze)


@lowers("prims.broadcast_in_dim.default")
def broadcast_in_dim(
    builder: Builder, x: Tensor, shape: Sequence[Dim], dims: Sequence[int]
) -> Tensor:
    at = positions(shape)
    source = [0 if size == 1 else at[d] for size, d in zip(x.shape, dims, strict=True)]
    return reindex(x, shape, source)


@lowers("prims.sum.default")
def prims_sum(builder: Builder, x: Tensor, dims: Any = None, **kw: Any) -> Tensor:
    return sum_over(builder, x, dims, False, kw.get("output_dtype"))


@lowers("prims.var.default")
def prims_var(builder: Builder, x: Tensor, dims: Any, correction: float = 1, **kw: Any) -> Tensor:
    return variance(builder, x, dims, correction)[0]
