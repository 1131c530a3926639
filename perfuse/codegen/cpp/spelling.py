"""C++ text of dtypes, literals and scalar ops. One table; a test keeps it complete."""

from __future__ import annotations

import math

from perfuse.ir.dtype import DType
from perfuse.ir.expr import SCALAR_OPS
from perfuse.ir.program import LoopKind

COMPUTE_TYPE = {
    DType.BOOL: "bool", DType.U8: "uint8_t", DType.I8: "int8_t", DType.U16: "uint16_t",
    DType.I16: "int16_t", DType.U32: "uint32_t", DType.I32: "int32_t", DType.U64: "uint64_t",
    DType.I64: "int64_t", DType.F32: "float", DType.F64: "double",
}  # fmt: skip
STORAGE_TYPE = {**COMPUTE_TYPE, **{d: f"pf::{d.value}" for d in DType if d.is_narrow_float}}
# Every scalar op is a function of the header under its own name, for vectors and scalars alike.
SPELLING = {name: f"pf::{name}" for name in SCALAR_OPS if name not in ("cast", "round_to")}

ACCUMULATOR = {
    LoopKind.SUM: "pf::Sum", LoopKind.PROD: "pf::Prod", LoopKind.MAX: "pf::Max",
    LoopKind.MIN: "pf::Min", LoopKind.ANY: "pf::Any", LoopKind.ALL: "pf::All",
    LoopKind.ARGMAX: "pf::ArgMax", LoopKind.ARGMIN: "pf::ArgMin",
}  # fmt: skip
# The two-operand form of a reduction, for accumulators that live in memory.
COMBINE = {
    LoopKind.SUM: "pf::add", LoopKind.PROD: "pf::mul", LoopKind.MAX: "pf::max",
    LoopKind.MIN: "pf::min", LoopKind.ANY: "pf::lor", LoopKind.ALL: "pf::land",
    LoopKind.CUMSUM: "pf::add", LoopKind.CUMPROD: "pf::mul",
}  # fmt: skip


def literal(value: bool | int | float, dtype: DType) -> str:
    """A constant of a compute type."""
    if dtype is DType.BOOL:
        return "true" if value else "false"
    if dtype.is_float:
        return _float_literal(float(value), "f" if dtype is DType.F32 else "")
    if dtype is DType.I64 and value == -(2**63):
        return "int64_t(-9223372036854775807LL - 1)"
    suffix = "ULL" if dtype is DType.U64 else "LL" if abs(int(value)) >= 2**31 else ""
    return f"{COMPUTE_TYPE[dtype]}({int(value)}{suffix})"


def _float_literal(value: float, suffix: str) -> str:
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(value):
        sign = "-" if value < 0 else ""
        return f"({sign}__builtin_inf{suffix}())" if suffix else f"({sign}__builtin_inf())"
    text = value.hex() if not value.is_integer() or abs(value) > 2**24 else f"{value:.1f}"
    return f"({text}{suffix})" if text.startswith("-") else f"{text}{suffix}"


def identity(kind: LoopKind, dtype: DType) -> str:
    """Where a reduction starts."""
    cpp = COMPUTE_TYPE[dtype]
    return {
        LoopKind.SUM: f"{cpp}(0)", LoopKind.PROD: f"{cpp}(1)", LoopKind.MAX: f"pf::lowest<{cpp}>()",
        LoopKind.MIN: f"pf::highest<{cpp}>()", LoopKind.ANY: "false", LoopKind.ALL: "true",
        LoopKind.CUMSUM: f"{cpp}(0)", LoopKind.CUMPROD: f"{cpp}(1)",
    }[kind]  # fmt: skip
