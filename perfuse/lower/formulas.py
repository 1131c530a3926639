"""Formulas that are better written another way: fewer transcendentals, no loss of accuracy."""

from __future__ import annotations

from perfuse.graph.decompose_pointwise import GELU_LINEAR
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
    """x + y; for gelu, 1 + erf(z) through a single exp, and its line a + b*x in one rounding."""
    for one, other in ((x, y), (y, x)):
        if one.op != "const" or one.dtype is not DType.F32:
            continue
        if one.attr == 1.0 and other.op == "erf":
            return _one_plus_erf(other.args[0])
        # Only inside gelu: the user's own products and sums are rounded one after the other.
        if one is _number(GELU_LINEAR) and other.op == "mul":
            return ex.apply("fma", *other.args, one)
    return ex.apply("add", x, y)


# log2(erfc(t)) / t on [0, 4] by powers of t, fitted so that erfc is off by at most 2e-8. 1 + erf(z)
# then is off by 1.5e-7 at most, and 0 below -4, where float32 rounds it to less than that.
_LOG2_ERFC = (
    -1.6279086610479496, -0.9184164206753939, -0.14848161933228596,
    0.028253680721333125, -0.0007746295938234693, -0.0014894416398455255,
    0.00044550766290345895, -4.53585976891594e-05,
)  # fmt: skip
_ERFC_VANISHES = 4.0


def _number(value: float) -> Expr:
    return ex.cast(ex.const(value, DType.F64), DType.F32)


def _one_plus_erf(z: Expr) -> Expr:
    t = ex.apply("abs", z)
    q = _number(_LOG2_ERFC[-1])
    for coefficient in reversed(_LOG2_ERFC[:-1]):
        q = ex.apply("fma", q, t, _number(coefficient))
    tail = ex.apply("exp2_mid", ex.apply("mul", q, t))
    # Compared in this order, NaN is preserved.
    tail = ex.apply("where", ex.apply("ge", t, _number(_ERFC_VANISHES)), _number(0.0), tail)
    rest = ex.apply("sub", _number(2.0), tail)
    return ex.apply("where", ex.apply("lt", z, _number(0.0)), tail, rest)
