"""Elementwise ops: rows of (ATen op, scalar op, type rule), and the few with their own formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from perfuse.errors import UnsupportedCast
from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType, from_torch, to_torch
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim, Index
from perfuse.ir.program import ARGUMENTS
from perfuse.lower import formulas
from perfuse.lower.builder import Builder
from perfuse.lower.promotion import promote
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, broadcast_shapes, cast_tensor, positions
from perfuse.torch_compat.state import disable_dispatch_modes

ScalarFn = Callable[..., Expr]


def element(operand: Any, dtype: DType) -> Expr:
    """The element of an operand (tensor already broadcast, or Python scalar) in a compute type."""
    if isinstance(operand, Tensor):
        return ex.cast(operand.value, dtype)
    if isinstance(operand, Index):
        return ex.cast(ex.index_value(operand), dtype)
    if isinstance(operand, bool | int | float):
        wide = DType.F64 if dtype.is_float else dtype
        return ex.cast(ex.const(operand, wide), dtype)
    raise CannotLower(f"operand of type {type(operand).__name__}")


def elementwise(
    builder: Builder,
    operands: list[Any],
    dtype: DType,
    formula: ScalarFn,
    wide: DType | None = None,
) -> Tensor:
    """Broadcast the operands and compute in `wide`, or in the compute type of the result."""
    shape = broadcast_shapes(*(o.shape for o in operands if isinstance(o, Tensor)))
    elements = [_spread(builder, operand, shape, wide or dtype.compute) for operand in operands]
    return Tensor(shape, dtype, ex.cast(formula(*elements), dtype))


def _spread(builder: Builder, operand: Any, shape: Sequence[Dim], dtype: DType) -> Expr:
    tensor = builder.broadcast(operand, shape) if isinstance(operand, Tensor) else operand
    return element(tensor, dtype)


def op(name: str) -> ScalarFn:
    return partial(ex.apply, name)


def in_dtype(dtype: DType, *operands: Any, numbers: bool = True) -> list[Any]:
    """Operands as eager's kernels read them: rounded to a small float that they share.

    Those are integers, numbers and tensors without dimensions. Products and quotients take the last
    two, and integer tensors of one element, unrounded: `numbers` is False.
    """
    if not dtype.is_narrow_float:
        return list(operands)
    kept = [not numbers and (not isinstance(o, Tensor) or o.numel == 1) for o in operands]
    return [o if is_kept else _rounded(o, dtype) for o, is_kept in zip(operands, kept, strict=True)]


def _rounded(operand: Any, dtype: DType) -> Any:
    if isinstance(operand, Tensor):
        return cast_tensor(operand, dtype)
    if isinstance(operand, int | float):
        with disable_dispatch_modes():
            return torch.tensor(float(operand), dtype=to_torch(dtype), device="cpu").item()
    return Tensor((), dtype, ex.round_to(element(operand, dtype.compute), dtype))


def alike(builder: Builder, dtype: DType, *operands: Any) -> list[Any]:
    """Operands of comparisons and remainders, which differ widely where two numbers nearly do.

    Beside one that was rounded to a small float, computed elements are rounded, too.
    """
    rounded = in_dtype(dtype, *operands)
    is_same = all(new == old for new, old in zip(rounded, operands, strict=True))
    return rounded if is_same else [_as_in_memory(builder, operand) for operand in rounded]


def _as_in_memory(builder: Builder, operand: Any) -> Any:
    if not isinstance(operand, Tensor):
        return operand
    value = operand.value
    if value.op == "load" and builder.buffers[value.buffer].kind in ARGUMENTS:
        return operand
    return Tensor(operand.shape, operand.dtype, ex.round_to(value, operand.dtype))


# Ops with a formula that looks at its argument.
FORMULAS: dict[str, ScalarFn] = {"tanh": formulas.tanh}
_OF_BOOLS = dict.fromkeys(("mul", "min", "fmin", "bit_and"), "land")
_OF_BOOLS |= dict.fromkeys(("max", "fmax", "bit_or"), "lor") | {"bit_xor": "lxor"}


def _float_unary(scalar_op: str) -> Callable[..., Tensor]:
    """Integers become the default float first."""
    formula = FORMULAS.get(scalar_op, op(scalar_op))

    def lower(builder: Builder, x: Tensor) -> Tensor:
        return elementwise(builder, [x], promote(x, int_to_float=True), formula)

    return lower


def _same_unary(scalar_op: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor) -> Tensor:
        keeps = {"sign": x.dtype is DType.BOOL, "abs": not x.dtype.is_signed}
        return x if keeps.get(scalar_op) else elementwise(builder, [x], x.dtype, op(scalar_op))

    return lower


def _round_unary(scalar_op: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor) -> Tensor:
        return elementwise(builder, [x], x.dtype, op(scalar_op)) if x.dtype.is_float else x

    return lower


def _bool_unary(scalar_op: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor) -> Tensor:
        if x.dtype.is_float:
            return elementwise(builder, [x], DType.BOOL, op(scalar_op), x.dtype.compute)
        answer = ex.const(scalar_op == "isfinite", DType.BOOL)
        if scalar_op == "signbit" and x.dtype.is_signed:
            answer = ex.apply("lt", x.value, ex.const(0, x.dtype))
        return Tensor(x.shape, DType.BOOL, answer)

    return lower


def _binary(scalar_op: str, int_to_float: bool = False) -> Callable[..., Tensor]:
    of_ints = {"fmin": "min", "fmax": "max"}.get(scalar_op, scalar_op)

    def lower(builder: Builder, a: Any, b: Any) -> Tensor:
        dtype = promote(a, b, int_to_float=int_to_float)
        chosen = scalar_op if dtype.is_float else of_ints
        if dtype is DType.BOOL:
            if scalar_op not in _OF_BOOLS:
                raise CannotLower(f"{scalar_op} of bool")
            chosen = _OF_BOOLS[scalar_op]
        operands = in_dtype(dtype, a, b, numbers=scalar_op != "mul")
        return elementwise(builder, operands, dtype, op(chosen))

    return lower


def _float_binary(scalar_op: str) -> Callable[..., Tensor]:
    return _binary(scalar_op, int_to_float=True)


def _comparison(scalar_op: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, a: Any, b: Any) -> Tensor:
        dtype = promote(a, b)
        wide = DType.U8 if dtype is DType.BOOL else dtype.compute
        return elementwise(builder, alike(builder, dtype, a, b), DType.BOOL, op(scalar_op), wide)

    return lower


def _bitwise(scalar_op: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, a: Any, b: Any) -> Tensor:
        dtype = promote(a, b)
        if dtype.is_float or (dtype is DType.BOOL and scalar_op not in _OF_BOOLS):
            raise CannotLower(f"{scalar_op} of {dtype}")
        chosen = _OF_BOOLS[scalar_op] if dtype is DType.BOOL else scalar_op
        return elementwise(builder, [a, b], dtype, op(chosen))

    return lower


def _logical(scalar_op: str) -> Callable[..., Tensor]:
    def lower(builder: Builder, a: Tensor, b: Tensor) -> Tensor:
        return elementwise(builder, [a, b], DType.BOOL, op(scalar_op))

    return lower


# A type rule, the overloads of its ops, and their names; `name:scalar op` where the two differ.
_ROWS = (
    (
        _float_unary,
        "default",
        "sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asin acos atan "
        "asinh acosh atanh erf erfc erfinv sigmoid reciprocal lgamma digamma",
    ),
    (_same_unary, "default", "neg abs sign sgn:sign"),
    (_round_unary, "default", "floor ceil trunc round"),
    (_bool_unary, "default", "isnan isinf isfinite signbit"),
    (_binary, "default", "minimum:min maximum:max fmin fmax hypot nextafter"),
    (_binary, "Tensor Scalar", "mul"),
    (_float_binary, "default", "atan2"),
    (_float_binary, "Tensor Scalar", "copysign"),
    (_comparison, "Tensor Scalar", "eq ne lt le gt ge"),
    (_bitwise, "Tensor Scalar Tensor_Scalar", "bitwise_and:bit_and bitwise_or:bit_or"),
    (_bitwise, "Tensor Scalar Tensor_Scalar", "bitwise_xor:bit_xor __lshift__:shl __rshift__:shr"),
    (_bitwise, "Tensor Scalar Tensor_Scalar", "bitwise_left_shift:shl bitwise_right_shift:shr"),
    (_logical, "default", "logical_and:land logical_or:lor logical_xor:lxor"),
)
for _rule, _overloads, _names in _ROWS:
    for _name, _, _scalar_op in (row.partition(":") for row in _names.split()):
        lowers(*(f"aten.{_name}.{o}" for o in _overloads.split()))(_rule(_scalar_op or _name))


@lowers("aten.logical_not.default")
def logical_not(builder: Builder, x: Tensor) -> Tensor:
    return Tensor(x.shape, DType.BOOL, ex.apply("lnot", ex.cast(x.value, DType.BOOL)))


@lowers("aten.bitwise_not.default")
def bitwise_not(builder: Builder, x: Tensor) -> Tensor:
    name = "lnot" if x.dtype is DType.BOOL else "bit_not"
    return Tensor(x.shape, x.dtype, ex.apply(name, x.value))


def _terms(builder: Builder, dtype: DType, *values: Any) -> list[Any]:
    """Terms and factors of a sum: on a CPU, eager rounds numbers to the result's dtype first."""
    return in_dtype(dtype, *values) if builder.device.type == "cpu" else list(values)


def _sum(builder: Builder, x: Expr, y: Expr, alpha: Any, *, is_negative: bool = False) -> Expr:
    """x + alpha * y, or x - alpha * y: eager's kernels for CPUs round it once."""
    if not isinstance(alpha, Tensor) and alpha == 1:
        return ex.apply("sub", x, y) if is_negative else formulas.add(x, y)
    factor = element(alpha, y.dtype)
    if builder.device.type == "cpu" and y.dtype.is_float:
        return ex.apply("fma", y, ex.apply("neg", factor) if is_negative else factor, x)
    scaled = ex.apply("mul", y, factor)
    return ex.apply("sub", x, scaled) if is_negative else formulas.add(x, scaled)


@lowers("aten.add.Tensor", "aten.add.Scalar")
def add(builder: Builder, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    dtype = promote(a, b)
    if dtype is DType.BOOL:
        return elementwise(builder, [a, b], dtype, op("lor") if alpha else lambda x, _: x)
    if alpha != 1:
        (alpha,) = _terms(builder, dtype, alpha)
    a, b = _terms(builder, dtype, a, b)
    return elementwise(builder, [a, b], dtype, partial(_sum, builder, alpha=alpha))


multiply = _binary("mul")


@lowers("prims.fma.default")
def fused_multiply_add(builder: Builder, a: Any, b: Any, c: Any) -> Tensor:
    """a * b + c, rounded once. Dynamo spells `addcmul` with it."""
    dtype = promote(a, b, c)
    return elementwise(builder, [a, b, c], dtype, op("fma"))


@lowers("aten.sub.Tensor", "aten.sub.Scalar")
def sub(builder: Builder, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    dtype = promote(a, b)
    if dtype is DType.BOOL:
        raise CannotLower("subtraction of bools")
    if alpha != 1:
        (alpha,) = _terms(builder, dtype, alpha)
    a, b = _terms(builder, dtype, a, b)
    difference = partial(_sum, builder, alpha=alpha, is_negative=True)
    return elementwise(builder, [a, b], dtype, difference)


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

    return elementwise(builder, in_dtype(dtype, a, b), dtype, formula)


def _int_power(builder: Builder, a: Any, b: Any, dtype: DType) -> Tensor:
    if not isinstance(b, int) or isinstance(b, bool) or not 0 <= b <= 8:
        raise CannotLower("integer power that is not a small constant")

    def formula(x: Expr) -> Expr:
        result = ex.const(1, dtype)
        for _ in range(b):
            result = ex.apply("mul", x, result)
        return result

    return elementwise(builder, [a], dtype, formula)


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
    return elementwise(builder, [x], x.dtype, _square)


@lowers("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(builder: Builder, condition: Tensor, a: Any, b: Any) -> Tensor:
    dtype = promote(a, b)
    shape = broadcast_shapes(*(t.shape for t in (condition, a, b) if isinstance(t, Tensor)))
    mask = ex.cast(builder.broadcast(condition, shape).value, DType.BOOL)
    choices = in_dtype(dtype, a, b)
    x, y = (_spread(builder, operand, shape, dtype.compute) for operand in choices)
    return Tensor(shape, dtype, ex.apply("where", mask, x, y))


@lowers("aten.clamp.default", "aten.clamp.Tensor")
@lowers("aten.clamp_min.default", "aten.clamp_min.Tensor")
def clamp(builder: Builder, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    limits = [(name, v) for name, v in (("max", low), ("min", high)) if v is not None]
    present = [x, *(limit for _, limit in limits)]
    dtype = promote(*present)

    def formula(value: Expr, *bounds: Expr) -> Expr:
        for (name, _), bound in zip(limits, bounds, strict=True):
            value = ex.apply(name, value, bound)
        return value

    if dtype is DType.BOOL:
        raise CannotLower("clamp of bool")
    return elementwise(builder, in_dtype(dtype, *present), dtype, formula)


@lowers("aten.clamp_max.default", "aten.clamp_max.Tensor")
def clamp_max(builder: Builder, x: Tensor, high: Any) -> Tensor:
    return clamp(builder, x, None, high)


@lowers("aten.relu.default")
def relu(builder: Builder, x: Tensor) -> Tensor:
    zero = ex.const(0, x.dtype.compute)
    return elementwise(builder, [x], x.dtype, lambda v: ex.apply("max", v, zero))


@lowers("aten._to_copy.default", "prims.convert_element_type.default", "aten.to.dtype")
def to_copy(builder: Builder, x: Tensor, dtype: Any = None, **kwargs: Any) -> Tensor:
    if kwargs.get("pin_memory") or kwargs.get("layout") not in (None, torch.strided):
        raise CannotLower("copy to another layout or pinned memory")
    device = kwargs.get("device")
    if device is not None and not _is_same_device(torch.device(device), builder.device):
        raise CannotLower("copy to another device")
    target = x.dtype if dtype is None else from_torch(dtype)
    if target is None:
        raise CannotLower(f"cast to {dtype}")
    return _converted(builder, x, target)


# The pair that GPUs do not convert directly. The sentence is one that programs match.
_CROSS_CAST = {DType.F8E4M3FN, DType.F8E5M2}
_CROSS_CAST_REFUSAL = "Conversions between float8_e5m2 and float8_e4m3fn is not supported!"


def _converted(builder: Builder, x: Tensor, dtype: DType) -> Tensor:
    if {x.dtype, dtype} == _CROSS_CAST and not builder.settings.fp8_cross_cast:
        raise UnsupportedCast(_CROSS_CAST_REFUSAL)
    return cast_tensor(x, dtype)


def _is_same_device(named: torch.device, device: torch.device) -> bool:
    return named.type == device.type and named.index in (None, device.index)


@lowers("aten.clone.default", "aten.contiguous.default")
def clone(builder: Builder, x: Tensor, memory_format: Any = None) -> Tensor:
    return x


@lowers("aten.copy.default", "aten.fill.Tensor")
def copy(builder: Builder, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return builder.broadcast(_converted(builder, source, x.dtype), x.shape)


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
