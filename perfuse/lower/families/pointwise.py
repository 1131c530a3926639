"""Elementwise ops: rows of (ATen op, scalar op, type rule), and the few with their own formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType, from_torch
from perfuse.ir.expr import Expr
from perfuse.ir.index import Index
from perfuse.lower import formulas
from perfuse.lower.builder import Builder
from perfuse.lower.promotion import promote
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, broadcast_shapes, cast_tensor, positions

ScalarFn = Callable[..., Expr]


def element(operand: Any, dtype: DType) -> Expr:
    """The element of an operand (tensor already broadcast, or Python scalar) in a compute type."""
    if isinstance(operand, Tensor):
        return ex.cast(operand.value, dtype)
    if isinstance(operand, Index):
        return ex.cast(ex.index_value(operand), dtype)
    if isinstance(operand, bool | int | float):
        if isinstance(operand, float) and dtype.is_int:
            operand = int(operand)
        return (
            ex.cast(ex.const(operand, DType.F64), dtype)
            if dtype.is_float
            else ex.const(operand, dtype)
        )
    raise CannotLower(f"operand of type {type(operand).__name__}")


def elementwise(
    builder: Builder,
    operands: list[Any],
    compute: DType,
    result: DType,
    formula: ScalarFn,
) -> Tensor:
    """Broadcast the operands, compute in one dtype, return another."""
    shapes = [o.shape for o in operands if isinstance(o, Tensor)]
    shape = broadcast_shapes(*shapes)
    elements = [
        element(builder.broadcast(o, shape) if isinstance(o, Tensor) else o, compute)
        for o in operands
    ]
    return Tensor(shape, result, ex.cast(formula(*elements), result))


def op(name: str) -> ScalarFn:
    def build(*args: Expr) -> Expr:
        return ex.apply(name, *args)

    return build


# ATen name: scalar op. Integers become the default float first.
FLOAT_UNARY = {
    "sqrt": "sqrt", "rsqrt": "rsqrt", "exp": "exp", "exp2": "exp2", "expm1": "expm1",
    "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p", "sin": "sin", "cos": "cos",
    "tan": "tan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "asin": "asin", "acos": "acos",
    "atan": "atan", "asinh": "asinh", "acosh": "acosh", "atanh": "atanh", "erf": "erf",
    "erfc": "erfc", "erfinv": "erfinv", "sigmoid": "sigmoid", "reciprocal": "reciprocal",
    "lgamma": "lgamma", "digamma": "digamma",
}  # fmt: skip
# Ops with a formula that looks at its argument.
FORMULAS: dict[str, ScalarFn] = {"tanh": formulas.tanh}
SAME_UNARY = {"neg": "neg", "abs": "abs", "sign": "sign", "sgn": "sign", "positive": ""}
ROUND_UNARY = {"floor": "floor", "ceil": "ceil", "trunc": "trunc"}
BOOL_UNARY = {"isnan": "isnan", "isinf": "isinf", "isfinite": "isfinite", "signbit": "signbit"}
SAME_BINARY = {
    "mul.Tensor": "mul", "mul.Scalar": "mul", "minimum": "min", "maximum": "max", "fmin": "fmin",
    "fmax": "fmax", "hypot": "hypot", "nextafter": "nextafter",
}  # fmt: skip
FLOAT_BINARY = {"atan2": "atan2", "copysign.Tensor": "copysign", "copysign.Scalar": "copysign"}
COMPARISONS = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}
BITWISE = {
    "bitwise_and": ("bit_and", "land"), "bitwise_or": ("bit_or", "lor"),
    "bitwise_xor": ("bit_xor", "lxor"), "bitwise_left_shift": ("shl", ""),
    "bitwise_right_shift": ("shr", ""), "__lshift__": ("shl", ""), "__rshift__": ("shr", ""),
}  # fmt: skip
LOGICAL = {"logical_and": "land", "logical_or": "lor", "logical_xor": "lxor"}


def _register_rows() -> None:
    for name, scalar_op in FLOAT_UNARY.items():
        lowers(f"aten.{name}.default")(_float_unary(scalar_op))
    for name, scalar_op in SAME_UNARY.items():
        lowers(f"aten.{name}.default")(_same_unary(scalar_op))
    for name, scalar_op in ROUND_UNARY.items():
        lowers(f"aten.{name}.default")(_round_unary(scalar_op))
    for name, scalar_op in BOOL_UNARY.items():
        lowers(f"aten.{name}.default")(_bool_unary(scalar_op))
    for name, scalar_op in SAME_BINARY.items():
        names = [name] if "." in name else [f"{name}.{o}" for o in ("default", "Tensor", "Scalar")]
        lowers(*(f"aten.{n}" for n in names))(_binary(scalar_op, int_to_float=False))
    for name, scalar_op in FLOAT_BINARY.items():
        lowers(f"aten.{name}" if "." in name else f"aten.{name}.default")(
            _binary(scalar_op, int_to_float=True)
        )
    for name, scalar_op in COMPARISONS.items():
        lowers(f"aten.{name}.Tensor", f"aten.{name}.Scalar")(_comparison(scalar_op))
    for name, pair in BITWISE.items():
        lowers(*(f"aten.{name}.{o}" for o in ("Tensor", "Scalar", "Tensor_Scalar")))(
            _bitwise(*pair)
        )
    for name, scalar_op in LOGICAL.items():
        lowers(f"aten.{name}.default")(_logical(scalar_op))


def _float_unary(scalar_op: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor) -> Tensor:
        dtype = promote(x, int_to_float=True)
        return elementwise(
            builder, [x], dtype.compute, dtype, FORMULAS.get(scalar_op, op(scalar_op))
        )

    return lower


def _same_unary(scalar_op: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor) -> Tensor:
        if not scalar_op or (x.dtype is DType.BOOL and scalar_op in ("abs", "sign")):
            return x
        if scalar_op == "abs" and x.dtype.is_int and not x.dtype.is_signed:
            return x
        return elementwise(builder, [x], x.dtype.compute, x.dtype, op(scalar_op))

    return lower


def _round_unary(scalar_op: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor) -> Tensor:
        if not x.dtype.is_float:
            return x
        return elementwise(builder, [x], x.dtype.compute, x.dtype, op(scalar_op))

    return lower


def _bool_unary(scalar_op: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor) -> Tensor:
        if not x.dtype.is_float:
            if scalar_op == "signbit":
                zero = ex.const(0, x.dtype)
                negative = (
                    ex.apply("lt", x.value, zero)
                    if x.dtype.is_signed
                    else ex.const(False, DType.BOOL)
                )
                return Tensor(x.shape, DType.BOOL, negative)
            return Tensor(x.shape, DType.BOOL, ex.const(scalar_op == "isfinite", DType.BOOL))
        return elementwise(builder, [x], x.dtype.compute, DType.BOOL, op(scalar_op))

    return lower


def _binary(scalar_op: str, *, int_to_float: bool) -> Callable[..., Tensor]:
    def lower(builder: Builder, a: Any, b: Any) -> Tensor:
        dtype = promote(a, b, int_to_float=int_to_float)
        if dtype is DType.BOOL:
            logic = {"mul": "land", "min": "land", "fmin": "land", "max": "lor", "fmax": "lor"}
            if scalar_op not in logic:
                raise CannotLower(f"{scalar_op} of bool")
            return elementwise(builder, [a, b], dtype, dtype, op(logic[scalar_op]))
        chosen = {"fmin": "min", "fmax": "max"}.get(scalar_op, scalar_op)
        return elementwise(
            builder, [a, b], dtype.compute, dtype, op(scalar_op if dtype.is_float else chosen)
        )

    return lower


def _comparison(scalar_op: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, a: Any, b: Any) -> Tensor:
        dtype = promote(a, b)
        if dtype is DType.BOOL:
            dtype = DType.U8
        return elementwise(builder, [a, b], dtype.compute, DType.BOOL, op(scalar_op))

    return lower


def _bitwise(of_ints: str, of_bools: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, a: Any, b: Any) -> Tensor:
        dtype = promote(a, b)
        if dtype.is_float or (dtype is DType.BOOL and not of_bools):
            raise CannotLower(f"{of_ints} of {dtype}")
        chosen = of_bools if dtype is DType.BOOL else of_ints
        return elementwise(builder, [a, b], dtype, dtype, op(chosen))

    return lower


def _logical(scalar_op: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, a: Tensor, b: Tensor) -> Tensor:
        def formula(x: Expr, y: Expr) -> Expr:
            return ex.apply(scalar_op, x, y)

        shape = broadcast_shapes(a.shape, b.shape)
        x, y = (ex.cast(builder.broadcast(t, shape).value, DType.BOOL) for t in (a, b))
        return Tensor(shape, DType.BOOL, formula(x, y))

    return lower


_register_rows()


@lowers("aten.logical_not.default")
def logical_not(builder: Builder, x: Tensor) -> Tensor:
    return Tensor(x.shape, DType.BOOL, ex.apply("lnot", ex.cast(x.value, DType.BOOL)))


@lowers("aten.bitwise_not.default")
def bitwise_not(builder: Builder, x: Tensor) -> Tensor:
    name = "lnot" if x.dtype is DType.BOOL else "bit_not"
    return Tensor(x.shape, x.dtype, ex.apply(name, x.value))


def _scaled(value: Expr, alpha: Any, dtype: DType) -> Expr:
    return value if alpha == 1 else ex.apply("mul", value, element(alpha, dtype))


@lowers("aten.add.Tensor", "aten.add.Scalar")
def add(builder: Builder, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    dtype = promote(a, b)
    if dtype is DType.BOOL:
        return elementwise(builder, [a, b], dtype, dtype, op("lor"))
    compute = dtype.compute
    return elementwise(
        builder, [a, b], compute, dtype,
        lambda x, y: formulas.add(x, _scaled(y, alpha, compute)),
    )  # fmt: skip


multiply = _binary("mul", int_to_float=False)


@lowers("prims.fma.default")
def fused_multiply_add(builder: Builder, a: Any, b: Any, c: Any) -> Tensor:
    """a * b + c, rounded once. Dynamo spells `addcmul` with it."""
    dtype = promote(a, b, c)
    return elementwise(builder, [a, b, c], dtype.compute, dtype, op("fma"))


@lowers("aten.sub.Tensor", "aten.sub.Scalar")
def sub(builder: Builder, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    dtype = promote(a, b)
    if dtype is DType.BOOL:
        raise CannotLower("subtraction of bools")
    compute = dtype.compute
    return elementwise(
        builder, [a, b], compute, dtype,
        lambda x, y: ex.apply("sub", x, _scaled(y, alpha, compute)),
    )  # fmt: skip


@lowers("aten.rsub.Tensor", "aten.rsub.Scalar")
def rsub(builder: Builder, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return sub(builder, b, a, alpha)


@lowers("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def power(builder: Builder, a: Any, b: Any) -> Tensor:
    dtype = promote(a, b)
    if not dtype.is_float:
        return _int_power(builder, a, b, dtype)

    def formula(x: Expr, y: Expr) -> Expr:
        known = _KNOWN_POWERS.get(y.attr) if y.op == "const" else None
        return known(x) if known is not None else ex.apply("pow", x, y)

    return elementwise(builder, [a, b], dtype.compute, dtype, formula)


def _int_power(builder: Builder, a: Any, b: Any, dtype: DType) -> Tensor:
    if not isinstance(b, int) or isinstance(b, bool) or not 0 <= b <= 8:
        raise CannotLower("integer power that is not a small constant")

    def formula(x: Expr) -> Expr:
        result = ex.const(1, dtype)
        for _ in range(b):
            result = ex.apply("mul", x, result)
        return result

    return elementwise(builder, [a], dtype, dtype, formula)


def _square(x: Expr) -> Expr:
    return ex.apply("mul", x, x)


_KNOWN_POWERS: dict[float, Callable[[Expr], Expr]] = {
    0.0: lambda x: ex.const(1.0, x.dtype),
    0.5: op("sqrt"),
    1.0: lambda x: x,
    2.0: _square,
    3.0: lambda x: ex.apply("mul", _square(x), x),
    4.0: lambda x: _square(_square(x)),
    -1.0: op("reciprocal"),
    -0.5: op("rsqrt"),
    -2.0: lambda x: ex.apply("reciprocal", _square(x)),
}


@lowers("aten.square.default")
def square(builder: Builder, x: Tensor) -> Tensor:
    return elementwise(builder, [x], x.dtype.compute, x.dtype, _square)


@lowers("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(builder: Builder, condition: Tensor, a: Any, b: Any) -> Tensor:
    dtype = promote(a, b)
    shape = broadcast_shapes(*(t.shape for t in (condition, a, b) if isinstance(t, Tensor)))
    mask = ex.cast(builder.broadcast(condition, shape).value, DType.BOOL)
    x, y = (
        element(builder.broadcast(t, shape) if isinstance(t, Tensor) else t, dtype.compute)
        for t in (a, b)
    )
    return Tensor(shape, dtype, ex.apply("where", mask, x, y))


@lowers("aten.clamp.default", "aten.clamp.Tensor")
def clamp(builder: Builder, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    present = [v for v in (x, low, high) if v is not None]
    dtype = promote(*present)

    def formula(*values: Expr) -> Expr:
        rest = list(values[1:])
        result = values[0]
        if low is not None:
            result = ex.apply("max", result, rest.pop(0))
        if high is not None:
            result = ex.apply("min", result, rest.pop(0))
        return result

    if dtype is DType.BOOL:
        raise CannotLower("clamp of bool")
    return elementwise(builder, present, dtype.compute, dtype, formula)


@lowers("aten.clamp_min.default", "aten.clamp_min.Tensor")
def clamp_min(builder: Builder, x: Tensor, low: Any) -> Tensor:
    return clamp(builder, x, low, None)


@lowers("aten.clamp_max.default", "aten.clamp_max.Tensor")
def clamp_max(builder: Builder, x: Tensor, high: Any) -> Tensor:
    return clamp(builder, x, None, high)


@lowers("aten.relu.default")
def relu(builder: Builder, x: Tensor) -> Tensor:
    zero = ex.const(0, x.dtype.compute)
    return elementwise(builder, [x], x.dtype.compute, x.dtype, lambda v: ex.apply("max", v, zero))


@lowers("aten.round.default")
def round_(builder: Builder, x: Tensor) -> Tensor:
    return _round_unary("round")(builder, x)


@lowers("aten._to_copy.default", "prims.convert_element_type.default", "aten.to.dtype")
def to_copy(builder: Builder, x: Tensor, dtype: Any = None, **kwargs: Any) -> Tensor:
    if any(kwargs.get(k) for k in ("pin_memory",)) or kwargs.get("layout") not in (
        None,
        torch.strided,
    ):
        raise CannotLower("copy to another layout or pinned memory")
    device = kwargs.get("device")
    if device is not None and not _is_same_device(torch.device(device), builder.device):
        raise CannotLower("copy to another device")
    target = x.dtype if dtype is None else from_torch(dtype)
    if target is None:
        raise CannotLower(f"cast to {dtype}")
    return cast_tensor(x, target)


def _is_same_device(named: torch.device, device: torch.device) -> bool:
    return named.type == device.type and named.index in (None, device.index)


@lowers("aten.clone.default", "aten.contiguous.default")
def clone(builder: Builder, x: Tensor, memory_format: Any = None) -> Tensor:
    return x


@lowers("aten.fill.Scalar", "aten.full_like.default")
def full_like(builder: Builder, x: Tensor, value: Any, dtype: Any = None, **kw: Any) -> Tensor:
    target = x.dtype if dtype is None else from_torch(dtype)
    if target is None:
        raise CannotLower(f"dtype {dtype}")
    filled = element(value, target.compute)
    return Tensor(x.shape, target, ex.round_to(filled, target))


@lowers("aten.copy.default")
def copy(builder: Builder, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return builder.broadcast(cast_tensor(source, x.dtype), x.shape)


@lowers("aten.fill.Tensor")
def fill_tensor(builder: Builder, x: Tensor, value: Tensor) -> Tensor:
    return builder.broadcast(cast_tensor(value, x.dtype), x.shape)


@lowers("aten.tril.default")
def tril(builder: Builder, x: Tensor, diagonal: Any = 0) -> Tensor:
    return _triangle(x, diagonal, "le")


@lowers("aten.triu.default")
def triu(builder: Builder, x: Tensor, diagonal: Any = 0) -> Tensor:
    return _triangle(x, diagonal, "ge")


def _triangle(x: Tensor, diagonal: Any, comparison: str) -> Tensor:
    at = positions(x.shape)
    keep = ex.apply(comparison, ex.index_value(at[-1] - at[-2]), element(diagonal, DType.I64))
    return Tensor(x.shape, x.dtype, ex.apply("where", keep, x.value, ex.const(0, x.dtype.compute)))
