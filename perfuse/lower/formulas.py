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


def add(x: Expr, y: Expr) -> Expr:
    """x + y, and 1 + erf(z) (gelu) through a single exp."""
    for one, other in ((x, y), (y, x)):
        if one.op == "const" and one.attr == 1.0 and other.op == "erf" and one.dtype is DType.F32:
            return _one_plus_erf(other.args[0])
    return ex.apply("add", x, y)


# log(erfc(t)) / t on [0, 9.2] by powers of t, fitted so that erfc is off by at most 4e-8; beyond,
# erfc is below 1e-38. 1 + erf(z) then is off by 1.7e-7, and right in the tail where adding cancels.
_LOG_ERFC = (
    -1.128381609916687, -0.6365774273872375, -0.10301505774259567, 0.019768696278333664,
    -0.0006776866503059864, -0.0010386373614892364, 0.0003774335200432688,
    -6.793525244574994e-05, 6.964965905353893e-06, -3.8565741533602704e-07, 8.948029872613006e-09,
)  # fmt: skip


def _one_plus_erf(z: Expr) -> Expr:
    t = ex.apply("min", ex.apply("abs", z), ex.const(9.2, DType.F32))
    q = ex.const(_LOG_ERFC[-1], DType.F32)
    for coefficient in reversed(_LOG_ERFC[:-1]):
        q = ex.apply("fma", q, t, ex.cast(ex.const(coefficient, DType.F64), DType.F32))
    tail = ex.apply("exp", ex.apply("mul", q, t))
    rest = ex.apply("sub", ex.const(2.0, DType.F32), tail)
    return ex.apply("where", ex.apply("lt", z, ex.const(0.0, DType.F32)), tail, rest)
