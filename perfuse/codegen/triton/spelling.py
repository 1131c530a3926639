"""Triton text of dtypes, literals and scalar ops."""

from __future__ import annotations

import math

from perfuse.ir.dtype import DType
from perfuse.ir.program import LoopKind

COMPUTE_TYPE = {
    DType.BOOL: "tl.int1", DType.U8: "tl.uint8", DType.I8: "tl.int8", DType.U16: "tl.uint16",
    DType.I16: "tl.int16", DType.U32: "tl.uint32", DType.I32: "tl.int32", DType.U64: "tl.uint64",
    DType.I64: "tl.int64", DType.F32: "tl.float32", DType.F64: "tl.float64",
}  # fmt: skip
NARROW_TYPE = {
    DType.F16: "tl.float16", DType.BF16: "tl.bfloat16", DType.F8E4M3FN: "tl.float8e4nv",
    DType.F8E5M2: "tl.float8e5", DType.F8E4M3FNUZ: "tl.float8e4b8",
    DType.F8E5M2FNUZ: "tl.float8e5b16",
}  # fmt: skip
POINTER_TYPE = {
    DType.BOOL: "*i1", DType.U8: "*u8", DType.I8: "*i8", DType.U16: "*u16", DType.I16: "*i16",
    DType.U32: "*u32", DType.I32: "*i32", DType.U64: "*u64", DType.I64: "*i64",
    DType.F16: "*fp16", DType.BF16: "*bf16", DType.F32: "*fp32", DType.F64: "*fp64",
    DType.F8E4M3FN: "*fp8e4nv", DType.F8E5M2: "*fp8e5", DType.F8E4M3FNUZ: "*fp8e4b8",
    DType.F8E5M2FNUZ: "*fp8e5b16",
}  # fmt: skip

_INT_RANGE = {
    DType.U8: (0, 255), DType.I8: (-128, 127), DType.U16: (0, 2**16 - 1),
    DType.I16: (-(2**15), 2**15 - 1), DType.U32: (0, 2**32 - 1), DType.I32: (-(2**31), 2**31 - 1),
    DType.U64: (0, 2**64 - 1), DType.I64: (-(2**63), 2**63 - 1),
}  # fmt: skip

_STARTS: dict[LoopKind, bool | int | float] = {
    LoopKind.SUM: 0, LoopKind.PROD: 1, LoopKind.ANY: False, LoopKind.ALL: True,
    LoopKind.CUMSUM: 0, LoopKind.CUMPROD: 1,
}  # fmt: skip
# {0}, {1} ... are the arguments. Names that start with pf_ are functions of `helpers.py`.
_EITHER = {
    "neg": "-({0})", "abs": "tl.abs({0})", "sign": "pf_sign({0})",
    "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})",
    "eq": "({0} == {1})", "ne": "({0} != {1})", "lt": "({0} < {1})", "le": "({0} <= {1})",
    "gt": "({0} > {1})", "ge": "({0} >= {1})", "where": "tl.where({0}, {1}, {2})",
    "land": "({0} & {1})", "lor": "({0} | {1})", "lxor": "({0} ^ {1})", "lnot": "({0} == 0)",
    "rand_f32": "pf_rand({0}, {1})", "randn_f32": "pf_randn({0}, {1})",
    "randint64": "pf_randint({0}, {1}, {2}, {3})",
}  # fmt: skip
_NAN = "propagate_nan=tl.PropagateNan.ALL"
_FLOATS = {
    # Triton's -x is 0 - x, which loses the sign of zero.
    "neg": "({0} * -1.0)",
    "floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "trunc": "libdevice.trunc({0})",
    "round": "libdevice.nearbyint({0})", "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "libdevice.rsqrt({0})", "reciprocal": "(1.0 / {0})", "exp_mid": "pf_exp_mid({0})",
    "exp2_mid": "tl.exp2({0})",
    "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "expm1": "libdevice.expm1({0})",
    "log": "tl.log({0})", "log2": "tl.log2({0})", "log10": "libdevice.log10({0})",
    "log1p": "libdevice.log1p({0})", "sigmoid": "(1.0 / (1.0 + pf_exp_mid(-({0}))))",
    "tanh": "libdevice.tanh({0})", "sin": "libdevice.sin({0})", "cos": "libdevice.cos({0})",
    "tan": "libdevice.tan({0})", "sinh": "libdevice.sinh({0})", "cosh": "libdevice.cosh({0})",
    "asin": "libdevice.asin({0})", "acos": "libdevice.acos({0})", "atan": "libdevice.atan({0})",
    "asinh": "libdevice.asinh({0})", "acosh": "libdevice.acosh({0})",
    "atanh": "libdevice.atanh({0})", "erf": "libdevice.erf({0})", "erfc": "libdevice.erfc({0})",
    "erfinv": "libdevice.erfinv({0})", "lgamma": "libdevice.lgamma({0})",
    "digamma": "pf_digamma({0})", "min": f"tl.minimum({{0}}, {{1}}, {_NAN})",
    "max": f"tl.maximum({{0}}, {{1}}, {_NAN})", "fmin": "tl.minimum({0}, {1})",
    "fmax": "tl.maximum({0}, {1})", "copysign": "libdevice.copysign({0}, {1})",
    "div": "({0} / {1})", "floordiv": "pf_floordiv_float({0}, {1})",
    "truncdiv": "libdevice.trunc({0} / {1})", "mod": "pf_mod_float({0}, {1})",
    "fmod": "libdevice.fmod({0}, {1})", "pow": "libdevice.pow({0}, {1})",
    "atan2": "libdevice.atan2({0}, {1})", "hypot": "libdevice.hypot({0}, {1})",
    "nextafter": "libdevice.nextafter({0}, {1})", "fma": "tl.fma({0}, {1}, {2})",
    "isnan": "({0} != {0})", "isinf": "(tl.abs({0}) == float('inf'))",
    "isfinite": "(tl.abs({0}) < float('inf'))", "signbit": "(libdevice.signbit({0}) != 0)",
    "to_bits": "{0}.to(tl.int32, bitcast=True)",
}  # fmt: skip
# Of float32 where nothing rounds the result to fewer bits: as eager's, to the last bit or nearly.
_ROUNDED = {
    "div": "tl.div_rn({0}, {1})", "reciprocal": "tl.div_rn(1.0, {0})",
    "truncdiv": "libdevice.trunc(tl.div_rn({0}, {1}))", "exp": "pf_exp({0})",
    "exp_mid": "libdevice.exp({0})",
    "sigmoid": "tl.div_rn(1.0, 1.0 + libdevice.exp(-({0})))",
}  # fmt: skip
# Of float32 that is rounded to fewer bits, where instructions are short: NVIDIA's alone.
_BRIEF = {
    "reciprocal": "pf_inverse({0})",
    "sigmoid": "pf_inverse(1.0 + tl.exp2(({0}) * -1.4426950408889634))",
}  # fmt: skip
# Of doubles alone: what the ones above have for float32 only.
_DOUBLES = {
    "sqrt": "tl.sqrt({0})", "exp_mid": "tl.exp({0})",
    "sigmoid": "(1.0 / (1.0 + tl.exp(-({0}))))",
}  # fmt: skip
_INTS = {
    "floor": "{0}", "ceil": "{0}", "trunc": "{0}", "round": "{0}", "bit_not": "~({0})",
    "min": "tl.minimum({0}, {1})", "max": "tl.maximum({0}, {1})", "fmin": "tl.minimum({0}, {1})",
    "fmax": "tl.maximum({0}, {1})", "bit_and": "({0} & {1})", "bit_or": "({0} | {1})",
    "bit_xor": "({0} ^ {1})", "shl": "pf_shl({0}, {1})", "shr": "pf_shr({0}, {1})",
    "div": "({0} // {1})", "floordiv": "pf_floordiv({0}, {1})", "truncdiv": "({0} // {1})",
    "divisor": "{0}",
    "mod": "pf_mod({0}, {1})", "fmod": "({0} % {1})", "pow": "pf_pow_int({0}, {1})",
    "fma": "({0} * {1} + {2})", "isnan": "({0} != {0})", "isinf": "({0} != {0})",
    "isfinite": "({0} == {0})", "signbit": "({0} < 0)",
    "from_bits": "{0}.to(tl.float32, bitcast=True)",
}  # fmt: skip
_BOOLS = {
    "neg": "{0}", "abs": "{0}", "sign": "{0}", "add": "({0} | {1})", "mul": "({0} & {1})",
    "sub": "({0} ^ {1})", "min": "({0} & {1})", "max": "({0} | {1})", "fmin": "({0} & {1})",
    "fmax": "({0} | {1})", "bit_not": "({0} == 0)", "lt": "(({0} == 0) & {1})",
    "gt": "({0} & ({1} == 0))", "le": "(({0} == 0) | {1})", "ge": "({0} | ({1} == 0))",
    "eq": "(({0} ^ {1}) == 0)", "ne": "({0} ^ {1})",
}  # fmt: skip


def spelling(op: str, dtype: DType, *, is_rounded: bool = False, is_brief: bool = False) -> str:
    """The template of a scalar op whose (last) argument has this compute dtype.

    Hardware divides and takes exponentials to a few units in the last place, cheaply. With
    `is_rounded`, quotients are rounded correctly, and exponentials as good for large arguments.
    With `is_brief`, inverses are a single instruction.
    """
    if is_rounded and dtype is DType.F32 and op in _ROUNDED:
        return _ROUNDED[op]
    if is_brief and not is_rounded and dtype is DType.F32 and op in _BRIEF:
        return _BRIEF[op]
    if dtype is DType.BOOL and op in _BOOLS:
        return _BOOLS[op]
    if dtype is DType.F64 and op in _DOUBLES:
        return _DOUBLES[op]
    table = _FLOATS if dtype.is_float else _INTS
    return table.get(op) or _EITHER[op]


def literal(value: bool | int | float, dtype: DType) -> str:
    """A constant of a compute type. Plain float32 ones take their partner's type."""
    if dtype is DType.F32:
        return _float_text(float(value))
    if dtype is DType.F64:
        return f"tl.full([], {_float_text(float(value))}, tl.float64)"
    if dtype is DType.BOOL:
        return f"tl.full([], {int(value)}, tl.int1)"
    return f"tl.full([], {int(value)}, {COMPUTE_TYPE[dtype]})"


def _float_text(value: float) -> str:
    if math.isnan(value) or math.isinf(value):
        return f"float('{value}')"
    return repr(value) if value >= 0 and math.copysign(1, value) > 0 else f"({value!r})"


def bare(value: bool | int | float, dtype: DType) -> str:
    """A number as `tl.full` takes it, beside the type."""
    return _float_text(float(value)) if dtype.is_float else str(int(value))


def typed(value: bool | int | float, dtype: DType) -> str:
    """A constant that stands alone, where no partner gives it its type."""
    if dtype is DType.F32:
        return f"tl.full([], {_float_text(float(value))}, tl.float32)"
    return literal(value, dtype)


def start(kind: LoopKind, dtype: DType) -> bool | int | float:
    """The number that a reduction in this compute type starts from."""
    if kind in _STARTS:
        return _STARTS[kind]
    is_max = kind in (LoopKind.MAX, LoopKind.ARGMAX)
    if dtype.is_float:
        return -math.inf if is_max else math.inf
    if dtype is DType.BOOL:
        return not is_max
    return _INT_RANGE[dtype][0 if is_max else 1]
