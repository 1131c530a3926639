"""Vector instructions that are functions of their operands: a table of types and functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.gfx9 import floats
from tests.gfx9.floats import BF8, FP8, clamped_to, fma, via_f64
from tests.gfx9.lanes import LANE

Array = np.ndarray[Any, Any]
Row = tuple[str, str, Callable[..., Any]]

U32, U64 = np.uint32, np.uint64
BELOW_LOW = np.array([(1 << min(k, 32)) - 1 for k in LANE], U32)
BELOW_HIGH = np.array([(1 << max(k - 32, 0)) - 1 for k in LANE], U32)


def _float_rows(t: str) -> dict[str, Row]:
    two = f"{t} {t}"
    return {
        f"v_add_{t}": (t, two, np.add),
        f"v_sub_{t}": (t, two, np.subtract),
        f"v_subrev_{t}": (t, two, lambda a, b: b - a),
        f"v_mul_{t}": (t, two, np.multiply),
        f"v_max_{t}": (t, two, np.fmax),
        f"v_min_{t}": (t, two, np.fmin),
        f"v_fma_{t}": (t, f"{two} {t}", fma),
        f"v_fmac_{t}": (t, f"{two} dst", fma),
        f"v_floor_{t}": (t, t, np.floor),
        f"v_ceil_{t}": (t, t, np.ceil),
        f"v_trunc_{t}": (t, t, np.trunc),
        f"v_rndne_{t}": (t, t, np.rint),
        f"v_fract_{t}": (t, t, floats.fract),
        f"v_rcp_{t}": (t, t, via_f64(lambda x: 1 / x)),
        f"v_rsq_{t}": (t, t, via_f64(lambda x: 1 / np.sqrt(x))),
        f"v_sqrt_{t}": (t, t, via_f64(np.sqrt)),
        f"v_exp_{t}": (t, t, via_f64(np.exp2)),
        f"v_log_{t}": (t, t, via_f64(np.log2)),
        f"v_sin_{t}": (t, t, via_f64(lambda x: np.sin(2 * np.pi * x))),
        f"v_cos_{t}": (t, t, via_f64(lambda x: np.cos(2 * np.pi * x))),
        f"v_frexp_mant_{t}": (t, t, floats.frexp_mantissa),
        f"v_frexp_exp_i32_{t}": ("i32", t, floats.frexp_exponent),
        f"v_ldexp_{t}": (t, f"{t} i32", floats.ldexp),
        f"v_med3_{t}": (t, f"{two} {t}", floats.median),
        f"v_max3_{t}": (t, f"{two} {t}", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
        f"v_min3_{t}": (t, f"{two} {t}", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    }


def _int_rows(bits: int) -> dict[str, Row]:
    """Arithmetic of 16 and 32 bits: signed and unsigned."""
    u, i, size = f"u{bits}", f"i{bits}", bits - 1
    count = np.dtype(f"u{bits // 8}").type
    return {
        f"v_add_{u}": (u, f"{u} {u}", np.add),
        f"v_sub_{u}": (u, f"{u} {u}", np.subtract),
        f"v_subrev_{u}": (u, f"{u} {u}", lambda a, b: b - a),
        f"v_add_{i}": (i, f"{i} {i}", np.add),
        f"v_sub_{i}": (i, f"{i} {i}", np.subtract),
        f"v_mul_lo_{u}": (u, f"{u} {u}", np.multiply),
        f"v_mad_legacy_{u}": (u, f"{u} {u} {u}", lambda a, b, c: a * b + c),
        f"v_mad_{u}": (u, f"{u} {u} {u}", lambda a, b, c: a * b + c),
        f"v_lshlrev_b{bits}": (u, f"{u} {u}", lambda n, x: x << (n & count(size))),
        f"v_lshrrev_b{bits}": (u, f"{u} {u}", lambda n, x: x >> (n & count(size))),
        f"v_ashrrev_{i}": (i, f"{u} {i}", lambda n, x: x >> (n & count(size)).astype(x.dtype)),
        **{
            f"v_{name}_{t}": (t, f"{t} {t}", function)
            for t in (u, i)
            for name, function in (("max", np.maximum), ("min", np.minimum))
        },
        **{
            f"v_{name}3_{t}": (t, f"{t} {t} {t}", partial(_three, function))
            for t in (u, i)
            for name, function in (("max", np.maximum), ("min", np.minimum))
        },
        **{f"v_med3_{t}": (t, f"{t} {t} {t}", _middle) for t in (u, i)},
    }


def _three(function: Any, a: Array, b: Array, c: Array) -> Any:
    return function(function(a, b), c)


def _middle(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def high_half(a: Array, b: Array) -> Array:
    """The upper half of a product."""
    wide = np.int64 if a.dtype == np.int32 else np.uint64
    return (a.astype(wide) * b.astype(wide)) >> wide(32)


def _u24(x: Array) -> Array:
    return x & U32(0xFFFFFF)


def _i24(x: Array) -> Array:
    return (x << np.int32(8)) >> np.int32(8)


def _bfe(x: Array, offset: Array, width: Array) -> Array:
    """Bits of a number from an offset on, sign-extended if it is signed."""
    offset, width = offset & U32(31), width & U32(31)
    mask = (U32(1) << width) - U32(1)
    part = (x.view(U32) >> offset) & mask
    if x.dtype != np.int32:
        return part
    sign = np.where(width > 0, (U32(1) << width) >> U32(1), U32(0))
    return ((part ^ sign) - sign).view(np.int32)


def _perm(upper: Array, lower: Array, select: Array) -> Array:
    """Bytes of two registers by their numbers; 12 gives zeros, above it ones, 8 to 11 signs."""
    both = (upper.astype(U64) << U64(32)) | lower
    result: Array = np.zeros(np.broadcast(both, select).shape, U32)
    for k in range(4):
        number = (select >> U32(8 * k)) & U32(0xFF)
        byte = (both >> (U64(8) * (number & U32(7)))).astype(U32) & U32(0xFF)
        sign_at = U64(16) * (number.astype(U64) & U64(3)) + U64(15)
        sign = ((both >> sign_at) & U64(1)).astype(U32) * U32(0xFF)
        byte = np.select([number < 8, number < 12, number == 12], [byte, sign, U32(0)], U32(0xFF))
        result = result | (byte.astype(U32) << U32(8 * k))
    return result


def reversed_bits(x: Array) -> Array:
    for by, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        x = ((x >> U32(by)) & U32(mask)) | ((x & U32(mask)) << U32(by))
    return (x >> U32(16)) | (x << U32(16))


def first_one_from_top(x: Array) -> Array:
    """The number of zeros above the highest bit; -1 of zero."""
    found = 31 - np.floor(np.log2(np.maximum(x, 1).astype(np.float64))).astype(np.int64)
    return np.where(x == 0, -1, found).astype(np.int32).view(U32)


def first_other_bit(x: Array) -> Array:
    """The number of bits from the top before one that differs from the sign; -1 if none does."""
    return first_one_from_top(np.where(x < 0, ~x, x).view(U32))


def first_one_from_bottom(x: Array) -> Array:
    lowest = x & (~x + U32(1))
    return np.where(x == 0, np.int32(-1), 31 - first_one_from_top(lowest).view(np.int32)).view(U32)


def _align(upper: Array, lower: Array, by: Array) -> Array:
    both = (upper.astype(U64) << U64(32)) | lower
    return (both >> by.astype(U64)).astype(U32)


def _packed16(low: Array, high: Array) -> Array:
    return low.view(np.uint16).astype(U32) | (high.view(np.uint16).astype(U32) << U32(16))


def _byte_of(x: Array, number: int) -> Array:
    return ((x >> U32(8 * number)) & U32(0xFF)).astype(np.float32)


BITWISE: dict[str, Row] = {
    "v_and_b32": ("u32", "u32 u32", np.bitwise_and),
    "v_or_b32": ("u32", "u32 u32", np.bitwise_or),
    "v_xor_b32": ("u32", "u32 u32", np.bitwise_xor),
    "v_xnor_b32": ("u32", "u32 u32", lambda a, b: ~(a ^ b)),
    "v_not_b32": ("u32", "u32", np.bitwise_not),
    "v_or3_b32": ("u32", "u32 u32 u32", lambda a, b, c: a | b | c),
    "v_and_or_b32": ("u32", "u32 u32 u32", lambda a, b, c: (a & b) | c),
    "v_bfi_b32": ("u32", "u32 u32 u32", lambda a, b, c: (a & b) | (~a & c)),
    "v_bfe_u32": ("u32", "u32 u32 u32", _bfe),
    "v_bfe_i32": ("i32", "i32 u32 u32", _bfe),
    "v_bfm_b32": ("u32", "u32 u32", lambda n, at: ((U32(1) << (n & 31)) - U32(1)) << (at & 31)),
    "v_bfrev_b32": ("u32", "u32", reversed_bits),
    "v_perm_b32": ("u32", "u32 u32 u32", _perm),
    "v_alignbit_b32": ("u32", "u32 u32 u32", lambda a, b, n: _align(a, b, n & U32(31))),
    "v_alignbyte_b32": ("u32", "u32 u32 u32", lambda a, b, n: _align(a, b, U32(8) * (n & U32(3)))),
    "v_bcnt_u32_b32": ("u32", "u32 u32", lambda a, b: np.bitwise_count(a).astype(U32) + b),
    "v_ffbh_u32": ("u32", "u32", first_one_from_top),
    "v_ffbh_i32": ("u32", "i32", first_other_bit),
    "v_ffbl_b32": ("u32", "u32", first_one_from_bottom),
    "v_mbcnt_lo_u32_b32": (
        "u32", "u32 u32", lambda a, b: np.bitwise_count(a & BELOW_LOW).astype(U32) + b
    ),
    "v_mbcnt_hi_u32_b32": (
        "u32", "u32 u32", lambda a, b: np.bitwise_count(a & BELOW_HIGH).astype(U32) + b
    ),
}  # fmt: skip

INTEGERS: dict[str, Row] = {
    **_int_rows(32),
    **_int_rows(16),
    "v_add3_u32": ("u32", "u32 u32 u32", lambda a, b, c: a + b + c),
    "v_xad_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u32": ("u32", "u32 u32 u32", lambda a, n, c: (a << (n & U32(31))) + c),
    "v_add_lshl_u32": ("u32", "u32 u32 u32", lambda a, b, n: (a + b) << (n & U32(31))),
    "v_lshl_or_b32": ("u32", "u32 u32 u32", lambda a, n, c: (a << (n & U32(31))) | c),
    "v_lshl_add_u64": ("u64", "u64 u32 u64", lambda a, n, c: (a << (n & U32(7))) + c),
    "v_lshlrev_b64": ("u64", "u32 u64", lambda n, x: x << (n & U32(63))),
    "v_lshrrev_b64": ("u64", "u32 u64", lambda n, x: x >> (n & U32(63))),
    "v_ashrrev_i64": ("i64", "u32 i64", lambda n, x: x >> (n & U32(63)).astype(np.int64)),
    "v_mul_hi_u32": ("u32", "u32 u32", high_half),
    "v_mul_hi_i32": ("i32", "i32 i32", high_half),
    "v_mul_u32_u24": ("u32", "u32 u32", lambda a, b: _u24(a) * _u24(b)),
    "v_mul_i32_i24": ("i32", "i32 i32", lambda a, b: _i24(a) * _i24(b)),
    "v_mul_hi_u32_u24": ("u32", "u32 u32", lambda a, b: high_half(_u24(a), _u24(b))),
    "v_mul_hi_i32_i24": ("i32", "i32 i32", lambda a, b: high_half(_i24(a), _i24(b))),
    "v_mad_u32_u24": ("u32", "u32 u32 u32", lambda a, b, c: _u24(a) * _u24(b) + c),
    "v_mad_i32_i24": ("i32", "i32 i32 i32", lambda a, b, c: _i24(a) * _i24(b) + c),
    "v_mad_u32_u16": ("u32", "u16 u16 u32", lambda a, b, c: a.astype(U32) * b.astype(U32) + c),
    "v_sad_u32": ("u32", "u32 u32 u32", lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c),
}

FLOATS: dict[str, Row] = {
    **_float_rows("f16"),
    **_float_rows("f32"),
    **_float_rows("f64"),
    "v_rcp_iflag_f32": ("f32", "f32", via_f64(lambda x: 1 / x)),
    "v_fmaak_f32": ("f32", "f32 f32 f32", fma),
    "v_fmamk_f32": ("f32", "f32 f32 f32", fma),
    "v_mul_legacy_f32": (
        "f32", "f32 f32", lambda a, b: np.where((a == 0) | (b == 0), np.float32(0), a * b)
    ),
    "v_trig_preop_f64": ("f64", "f64 u32", floats.trig_preop),
    "v_div_fixup_f32": ("f32", "f32 f32 f32", floats.div_fixup),
    "v_div_fixup_f64": ("f64", "f64 f64 f64", floats.div_fixup),
}  # fmt: skip

CONVERSIONS: dict[str, Row] = {
    "v_cvt_f16_f32": ("f16", "f32", lambda x: x.astype(np.float16)),
    "v_cvt_f32_f16": ("f32", "f16", lambda x: x.astype(np.float32)),
    "v_cvt_f64_f32": ("f64", "f32", lambda x: x.astype(np.float64)),
    "v_cvt_f32_f64": ("f32", "f64", lambda x: x.astype(np.float32)),
    **{
        f"v_cvt_f{width}_{t}": (f"f{width}", t, lambda x, to=to: x.astype(to))
        for width, to in ((32, np.float32), (64, np.float64))
        for t in ("u32", "i32")
    },
    **{
        f"v_cvt_{t}_f{width}": (t, f"f{width}", partial(clamped_to, kind=to))
        for width in (32, 64)
        for t, to in (("u32", np.uint32), ("i32", np.int32))
    },
    "v_cvt_f16_u16": ("f16", "u16", lambda x: x.astype(np.float16)),
    "v_cvt_f16_i16": ("f16", "i16", lambda x: x.astype(np.float16)),
    "v_cvt_u16_f16": ("u16", "f16", partial(clamped_to, kind=np.uint16)),
    "v_cvt_i16_f16": ("i16", "f16", partial(clamped_to, kind=np.int16)),
    **{f"v_cvt_f32_ubyte{k}": ("f32", "u32", partial(_byte_of, number=k)) for k in range(4)},
    "v_cvt_pkrtz_f16_f32": (
        "u32", "f32 f32",
        lambda a, b: _packed16(floats.toward_zero_f16(a), floats.toward_zero_f16(b)),
    ),
    "v_pack_b32_f16": ("u32", "f16 f16", _packed16),
    "v_cvt_f32_fp8": ("f32", "u32", lambda x: FP8.decoded(x & U32(0xFF))),
    "v_cvt_f32_bf8": ("f32", "u32", lambda x: BF8.decoded(x & U32(0xFF))),
}  # fmt: skip

MOVES: dict[str, Row] = {
    "v_mov_b32": ("u32", "u32", lambda x: x),
    "v_mov_b64": ("u64", "u64", lambda x: x),
    "v_accvgpr_read_b32": ("u32", "u32", lambda x: x),
    "v_accvgpr_write_b32": ("u32", "u32", lambda x: x),
    "v_accvgpr_mov_b32": ("u32", "u32", lambda x: x),
}

# Instruction -> type of the result, types of the operands ("dst" is the destination's old value).
VECTOR: dict[str, Row] = {**MOVES, **BITWISE, **INTEGERS, **FLOATS, **CONVERSIONS}
