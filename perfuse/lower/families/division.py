"""Divisions: true ones, and those with a rule for the remainder, which report an integer zero."""

from __future__ import annotations

from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.lower.builder import Builder
from perfuse.lower.families.pointwise import alike, elementwise, in_dtype, op
from perfuse.lower.promotion import promote
from perfuse.lower.registry import lowers
from perfuse.lower.tensor import Tensor


@lowers("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")
def div(builder: Builder, a: Any, b: Any) -> Tensor:
    dtype = promote(a, b, int_to_float=True)
    if builder.is_exact and builder.device.type != "cpu" and _is_number(b):
        return elementwise(builder, [a, b], dtype, _times_inverse)
    return elementwise(builder, in_dtype(dtype, a, b, numbers=False), dtype, op("div"))


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) and value != 0


def _times_inverse(x: Expr, y: Expr) -> Expr:
    """x / y as eager computes it on GPUs for a number y."""
    inverse = ex.cast(ex.const(1.0 / y.attr, DType.F64), y.dtype)
    return ex.apply("mul", x, inverse)


@lowers("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def div_mode(builder: Builder, a: Any, b: Any, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is None:
        return div(builder, a, b)
    dtype = promote(a, b)
    if rounding_mode == "floor":
        return divided(builder, a, b, "floordiv")
    if dtype.is_float:
        trunc = op("trunc")
        a, b = in_dtype(dtype, a, b, numbers=False)
        return elementwise(builder, [a, b], dtype, lambda x, y: trunc(ex.apply("div", x, y)))
    return divided(builder, a, b, "truncdiv")


# Eager divides small floats by a number as it is.
_UNROUNDED = ("floordiv", "truncdiv")


def divided(builder: Builder, a: Any, b: Any, scalar_op: str) -> Tensor:
    """A division with a rule for the remainder.

    Eager raises for an integer zero among the divisors, whichever elements of the result are used:
    so all are computed here, where no mask of a later op hides or invents a divisor.
    """
    dtype = promote(a, b)
    if scalar_op in _UNROUNDED:
        (a,), (b,) = in_dtype(dtype, a), in_dtype(dtype, b, numbers=False)
    else:
        a, b = alike(builder, dtype, a, b)
    reports = not dtype.is_float and not builder.is_gpu
    checked = _reported if reports else lambda divisor: divisor
    made = elementwise(builder, [a, b], dtype, lambda x, y: ex.apply(scalar_op, x, checked(y)))
    is_reported = made.value.op == scalar_op and made.value.args[1].op == "divisor"
    return builder.realize(made) if is_reported else made


def _reported(divisor: Expr) -> Expr:
    """The divisor, reported where it is zero, unless it is known not to be."""
    if divisor.op == "const" and divisor.attr != 0:
        return divisor
    if divisor.op == "index" and ix.is_nonnegative(ix.add(divisor.attr, -1)):
        return divisor
    return ex.apply("divisor", divisor)


@lowers("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def remainder(builder: Builder, a: Any, b: Any) -> Tensor:
    return divided(builder, a, b, "mod")


@lowers("aten.fmod.Tensor", "aten.fmod.Scalar")
def fmod(builder: Builder, a: Any, b: Any) -> Tensor:
    return divided(builder, a, b, "fmod")
