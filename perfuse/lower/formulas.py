"""Formulas that are better written another way: fewer transcendentals, no loss of accuracy."""

from __future__ import annotations

from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr


def tanh(x: Expr) -> Expr:
    """tanh, and tanh of a softplus (mish) through a single exp."""
    inner = _softplus_argument(x)
    return ex.apply("tanh", x) if inner is None else _tanh_of_softplus(inner)


def _tanh_of_softplus(x: Expr) -> Expr:
    """tanh(log(1 + e)) is n / (n + 2) with n = e*e + 2e; from 20 on it rounds to 1 anyway."""
    e = ex.apply("exp", ex.apply("min", x, ex.const(20.0, DType.F32)))
    two = ex.const(2.0, DType.F32)
    n = ex.apply("mul", e, ex.apply("add", e, two))
    return ex.apply("div", n, ex.apply("add", n, two))


def _softplus_argument(value: Expr) -> Expr | None:
    """x, if the value is softplus(x) with PyTorch's defaults as we decompose it."""
    if value.dtype is not DType.F32 or value.op != "where":
        return None
    condition, x, _ = value.args
    if condition.op != "gt" or condition.args[0] is not x:
        return None
    return x if value is _softplus(x) else None


def _softplus(x: Expr) -> Expr:
    """As graph/decompose_pointwise writes it; equal formulas are the same object."""
    small = ex.apply("log1p", ex.apply("exp", ex.apply("neg", ex.apply("abs", x))))
    stable = ex.apply("add", ex.apply("max", x, ex.const(0.0, DType.F32)), small)
    return ex.apply("where", ex.apply("gt", x, ex.const(20.0, DType.F32)), x, stable)
