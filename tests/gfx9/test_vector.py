"""Vector instructions, a row each, against numpy and plain Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests.gfx9.assembler import are_assembled
from tests.gfx9.errors import UnknownInstruction
from tests.gfx9.floats import BF8, FP8
from tests.gfx9.snippets import (
    NUM_WAVES,
    UNTOUCHED,
    computed,
    execute,
    new_waves,
    random_inputs,
    set_vector,
    vector,
)
from tests.gfx9.waves import LANES

Array = np.ndarray[Any, Any]
M32, M64 = (1 << 32) - 1, (1 << 64) - 1


@dataclass(frozen=True)
class Row:
    """An instruction, the types of its inputs and its result, and one lane of it in Python."""

    line: str
    inputs: str
    result: str
    of_lane: Callable[..., Any]

    def __str__(self) -> str:
        return self.line.partition(" ")[0]


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> bits - 1 else x


def perm(a: int, b: int, select: int) -> int:
    both, made = a << 32 | b, 0
    for k in range(4):
        n = select >> 8 * k & 255
        sign = 255 if 8 <= n < 12 and both >> 16 * (n - 8) + 15 & 1 else 0
        made |= (
            both >> 8 * n & 255 if n < 8 else sign if n < 12 else 0 if n == 12 else 255
        ) << 8 * k
    return made


def clz(x: int) -> int:
    return 32 - x.bit_length() if x else M32


INTEGERS = [
    Row("v_add_u32_e32 v8, v0, v2", "u32 u32", "u32", lambda a, b: a + b & M32),
    Row("v_sub_u32_e32 v8, v0, v2", "u32 u32", "u32", lambda a, b: a - b & M32),
    Row("v_subrev_u32_e32 v8, v0, v2", "u32 u32", "u32", lambda a, b: b - a & M32),
    Row("v_sub_u32_e64 v8, v0, v2 clamp", "u32 u32", "u32", lambda a, b: max(a - b, 0)),
    Row("v_add_u32_e64 v8, v0, v2 clamp", "u32 u32", "u32", lambda a, b: min(a + b, M32)),
    Row("v_add3_u32 v8, v0, v2, v4", "u32 u32 u32", "u32", lambda a, b, c: a + b + c & M32),
    Row("v_mul_lo_u32 v8, v0, v2", "u32 u32", "u32", lambda a, b: a * b & M32),
    Row("v_mul_hi_u32 v8, v0, v2", "u32 u32", "u32", lambda a, b: a * b >> 32),
    Row("v_mul_hi_i32 v8, v0, v2", "i32 i32", "i32", lambda a, b: a * b >> 32),
    Row("v_mul_u32_u24_e32 v8, v0, v2", "u32 u32", "u32",
        lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) & M32),
    Row("v_mul_hi_i32_i24_e32 v8, v0, v2", "i32 i32", "i32",
        lambda a, b: signed(a, 24) * signed(b, 24) >> 32),
    Row("v_mad_i32_i24 v8, v0, v2, v4", "i32 i32 i32", "i32",
        lambda a, b, c: signed(signed(a, 24) * signed(b, 24) + c)),
    Row("v_mad_u64_u32 v[8:9], vcc, v0, v2, v[4:5]", "u32 u32 u64", "u64",
        lambda a, b, c: a * b + c & M64),
    Row("v_lshl_add_u64 v[8:9], v[0:1], 3, v[4:5]", "u64 u32 u64", "u64",
        lambda a, _, c: (a << 3) + c & M64),
    Row("v_lshl_add_u32 v8, v0, v2, v4", "u32 u32 u32", "u32",
        lambda a, n, c: (a << n % 32) + c & M32),
    Row("v_add_lshl_u32 v8, v0, v2, v4", "u32 u32 u32", "u32",
        lambda a, b, n: (a + b & M32) << n % 32 & M32),
    Row("v_lshl_or_b32 v8, v0, v2, v4", "u32 u32 u32", "u32",
        lambda a, n, c: a << n % 32 & M32 | c),
    Row("v_xad_u32 v8, v0, v2, v4", "u32 u32 u32", "u32", lambda a, b, c: (a ^ b) + c & M32),
    Row("v_and_or_b32 v8, v0, v2, v4", "u32 u32 u32", "u32", lambda a, b, c: a & b | c),
    Row("v_or3_b32 v8, v0, v2, v4", "u32 u32 u32", "u32", lambda a, b, c: a | b | c),
    Row("v_bfi_b32 v8, v0, v2, v4", "u32 u32 u32", "u32", lambda a, b, c: a & b | ~a & c & M32),
    Row("v_bfe_u32 v8, v0, v2, v4", "u32 u32 u32", "u32",
        lambda a, at, n: a >> at % 32 & (1 << n % 32) - 1),
    Row("v_bfe_i32 v8, v0, 3, 7", "u32", "i32", lambda a: signed(a >> 3, 7)),
    Row("v_bfrev_b32_e32 v8, v0", "u32", "u32", lambda a: int(f"{a:032b}"[::-1], 2)),
    Row("v_perm_b32 v8, v0, v2, v4", "u32 u32 u32", "u32", perm),
    Row("v_alignbit_b32 v8, v0, v2, v4", "u32 u32 u32", "u32",
        lambda a, b, n: (a << 32 | b) >> n % 32 & M32),
    Row("v_lshlrev_b32_e32 v8, v0, v2", "u32 u32", "u32", lambda n, x: x << n % 32 & M32),
    Row("v_lshrrev_b32_e32 v8, v0, v2", "u32 u32", "u32", lambda n, x: x >> n % 32),
    Row("v_ashrrev_i32_e32 v8, v0, v2", "u32 i32", "i32", lambda n, x: x >> n % 32),
    Row("v_lshlrev_b64 v[8:9], v0, v[2:3]", "u32 u64", "u64", lambda n, x: x << n % 64 & M64),
    Row("v_ashrrev_i64 v[8:9], v0, v[2:3]", "u32 i64", "i64", lambda n, x: x >> n % 64),
    Row("v_lshlrev_b16_e32 v8, v0, v2", "u16 u16", "u32", lambda n, x: x << n % 16 & 0xFFFF),
    Row("v_mul_lo_u16_e32 v8, v0, v2", "u16 u16", "u32", lambda a, b: a * b & 0xFFFF),
    Row("v_ashrrev_i16_e32 v8, v0, v2", "u16 i16", "i16", lambda n, x: x >> n % 16),
    Row("v_max_i32_e32 v8, v0, v2", "i32 i32", "i32", max),
    Row("v_min_u32_e32 v8, v0, v2", "u32 u32", "u32", min),
    Row("v_med3_i32 v8, v0, v2, v4", "i32 i32 i32", "i32", lambda *x: sorted(x)[1]),
    Row("v_ffbh_u32_e32 v8, v0", "u32", "u32", clz),
    Row("v_ffbl_b32_e32 v8, v0", "u32", "u32", lambda x: (x & -x).bit_length() - 1 & M32),
    Row("v_bcnt_u32_b32 v8, v0, v2", "u32 u32", "u32", lambda a, b: a.bit_count() + b & M32),
    Row("v_not_b32_e32 v8, v0", "u32", "u32", lambda a: ~a & M32),
    Row("v_mov_b32_e32 v8, 0x1234", "", "u32", lambda: 0x1234),
    Row("v_mov_b32_e32 v8, -16", "", "u32", lambda: M32 - 15),
    Row("v_cvt_u32_f32_e32 v8, v0", "f32", "u32",
        lambda x: 0 if x != x else int(min(max(x, 0), M32))),
    Row("v_cvt_i32_f64_e32 v8, v[0:1]", "f64", "i32",
        lambda x: 0 if x != x else int(min(max(x, -(1 << 31)), (1 << 31) - 1))),
    Row("v_cvt_f32_ubyte2_e32 v8, v0", "u32", "f32", lambda x: float(x >> 16 & 255)),
]  # fmt: skip


def exact(*numbers: float) -> Any:
    """Sums and products of float32 in exact arithmetic; None if one is not finite."""
    return [Fraction(float(n)) for n in numbers] if np.isfinite(numbers).all() else None


def rounded_fma(a: float, b: float, c: float) -> np.float32:
    parts = exact(a, b, c)
    if parts is None:
        return np.float32(a) * np.float32(b) + np.float32(c)
    total = parts[0] * parts[1] + parts[2]
    if total == 0:
        return np.float32(np.float64(a) * b + c)
    return nearest_f32(total)


def nearest_f32(value: Fraction) -> np.float32:
    """The float32 nearest to a fraction, ties to even."""
    size = abs(value)
    power = max(size.numerator.bit_length() - size.denominator.bit_length() - 24, -149)
    while power < -149 or size / Fraction(2) ** power >= 1 << 24:
        power += 1
    while power > -149 and size / Fraction(2) ** power < 1 << 23:
        power -= 1
    mantissa = round(size / Fraction(2) ** power)
    if power + mantissa.bit_length() > 128:
        return np.float32(np.inf if value > 0 else -np.inf)
    return np.float32((1 if value > 0 else -1) * float(mantissa * Fraction(2) ** power))


def f32(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*(np.float32(x) for x in args))


FLOATS = [
    Row("v_add_f32_e32 v8, v0, v2", "f32 f32", "f32", f32(lambda a, b: a + b)),
    Row("v_sub_f32_e64 v8, |v0|, -v2", "f32 f32", "f32", f32(lambda a, b: abs(a) + b)),
    Row("v_subrev_f32_e32 v8, v0, v2", "f32 f32", "f32", f32(lambda a, b: b - a)),
    Row("v_mul_f32_e32 v8, 0.5, v0", "f32", "f32", f32(lambda a: a * np.float32(0.5))),
    Row("v_fma_f32 v8, v0, v2, -v4", "f32 f32 f32", "f32", lambda a, b, c: rounded_fma(a, b, -c)),
    Row("v_fmaak_f32 v8, v0, v2, 0x40490fdb", "f32 f32", "f32",
        lambda a, b: rounded_fma(a, b, np.float32(np.pi))),
    Row("v_fmamk_f32 v8, v0, 0x40490fdb, v2", "f32 f32", "f32",
        lambda a, b: rounded_fma(a, np.float32(np.pi), b)),
    Row("v_max_f32_e32 v8, v0, v2", "f32 f32", "f32", np.fmax),
    Row("v_min_f32_e32 v8, v0, v2", "f32 f32", "f32", np.fmin),
    Row("v_rndne_f32_e32 v8, v0", "f32", "f32", np.rint),
    Row("v_ldexp_f32 v8, v0, -3", "f32", "f32", f32(lambda a: a / np.float32(8))),
    Row("v_frexp_mant_f32_e32 v8, v0", "f32", "f32",
        lambda a: np.frexp(np.float32(a))[0] if np.isfinite(a) else a),
    Row("v_add_f64 v[8:9], v[0:1], -v[2:3]", "f64 f64", "f64", lambda a, b: a - b),
    Row("v_mul_f64 v[8:9], v[0:1], 2.0", "f64", "f64", lambda a: a * 2),
    Row("v_cvt_f16_f32_e32 v8, v0", "f32", "f16", np.float16),
    Row("v_cvt_f32_f16_e32 v8, v0", "f16", "f32", np.float32),
    Row("v_cvt_f64_f32_e32 v[8:9], v0", "f32", "f64", np.float64),
    Row("v_cvt_f32_f64_e32 v8, v[0:1]", "f64", "f32", np.float32),
    Row("v_add_f16_e32 v8, v0, v2", "f16 f16", "f16", lambda a, b: np.float16(a) + np.float16(b)),
    Row("v_mul_f32_e64 v8, v0, v2 clamp", "f32 f32", "f32",
        f32(lambda a, b: 0 if (a * b != a * b) else min(max(a * b, 0), 1))),
    Row("v_exp_f32_e32 v8, v0", "f32", "f32", lambda a: np.float32(np.exp2(np.float64(a)))),
    Row("v_log_f32_e32 v8, v0", "f32", "f32", lambda a: np.float32(np.log2(np.float64(a)))),
    Row("v_rsq_f32_e32 v8, v0", "f32", "f32", lambda a: np.float32(1 / np.sqrt(np.float64(a)))),
]  # fmt: skip


@pytest.mark.parametrize("row", [*INTEGERS, *FLOATS], ids=str)
def test_a_lane_at_a_time(row: Row) -> None:
    inputs = random_inputs(*row.inputs.split(), seed=len(row.line))
    kind = {"u": "uint", "i": "int", "f": "float"}[row.result[0]] + row.result[1:]
    got, w = computed(row.line, inputs, kind)
    with np.errstate(all="ignore"):
        wanted = [
            [row.of_lane(*(x[wave, lane].item() for x in inputs)) for lane in range(LANES)]
            for wave in range(NUM_WAVES)
        ]
        expected = np.array(wanted, kind)
    assert np.array_equal(got[w.exec], expected[w.exec], equal_nan=kind.startswith("f"))
    assert (w.vectors["v"][8][~w.exec] == UNTOUCHED).all(), "lanes that are off were written"


DIVISION = (
    "v_div_scale_f32 v9, s[4:5], v2, v2, v0",
    "v_div_scale_f32 v10, vcc, v0, v2, v0",
    "v_rcp_f32_e32 v11, v9",
    "v_fma_f32 v12, -v9, v11, 1.0",
    "v_fma_f32 v11, v12, v11, v11",
    "v_mul_f32_e32 v12, v10, v11",
    "v_fma_f32 v13, -v9, v12, v10",
    "v_fma_f32 v12, v13, v11, v12",
    "v_fma_f32 v9, -v9, v12, v10",
    "v_div_fmas_f32 v9, v9, v11, v12",
    "v_div_fixup_f32 v8, v9, v2, v0",
)


@pytest.mark.parametrize("seed", range(8))
def test_division_is_rounded_correctly(seed: int) -> None:
    """LLVM's sequence for a / b, with bits of any kind: denormal, infinite, not a number."""
    w = new_waves()
    a, b = random_inputs("f32", "f32", seed=100 + seed)
    set_vector(w, 0, a)
    set_vector(w, 2, b)
    execute(w, *DIVISION)
    with np.errstate(all="ignore"):
        expected = a / b
    # Quotients that are denormal are rounded twice, by the unit too.
    is_normal = ~((np.abs(expected) < np.finfo(np.float32).tiny) & (expected != 0))
    got = vector(w, 8, np.float32)
    assert np.array_equal(got[is_normal], expected[is_normal], equal_nan=True)
    assert np.allclose(got[~is_normal], expected[~is_normal], rtol=0, atol=1e-44)


def test_double_fma_is_exact_where_products_cancel() -> None:
    w = new_waves()
    a = 1 + random_inputs("f64")[0].view(np.uint64) % 1000 * 2.0**-40
    for number, values in enumerate((a, a, -(a * a))):
        set_vector(w, 2 * number, values)
    execute(w, "v_fma_f64 v[8:9], v[0:1], v[2:3], v[4:5]")
    expected = [float(Fraction(x) ** 2 - Fraction(x * x)) for x in a.reshape(-1)]
    assert np.array_equal(vector(w, 8, np.float64).reshape(-1), expected)


WHOLE = "dst_sel:DWORD dst_unused:UNUSED_PAD"
SELECTED = [
    (f"v_and_b32_sdwa v8, v0, v2 {WHOLE} src0_sel:WORD_1 src1_sel:BYTE_3",
     lambda a, b: a >> 16 & b >> 24),
    ("v_or_b32_sdwa v8, v0, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
     lambda a, b: ((a | b) & 255) << 8),
    (f"v_add_u32_sdwa v8, v0, sext(v2) {WHOLE} src0_sel:DWORD src1_sel:WORD_0",
     lambda a, b: a + signed(b, 16) & M32),
    ("v_mov_b32_sdwa v8, v0 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2",
     lambda a, b: (a >> 16 & 255) << 16 | UNTOUCHED & 0xFFFF),
    ("v_mov_b32_sdwa v8, v0 dst_sel:BYTE_0 dst_unused:UNUSED_SEXT src0_sel:BYTE_1",
     lambda a, b: signed(a >> 8, 8) & M32),
]  # fmt: skip


@pytest.mark.parametrize(("line", "of_lane"), SELECTED)
def test_selected_parts_of_registers(line: str, of_lane: Callable[[int, int], int]) -> None:
    inputs = random_inputs("u32", "u32")
    got, w = computed(line, inputs, np.uint32)
    pairs = zip(*(x.reshape(-1).tolist() for x in inputs), strict=True)
    expected = np.array([of_lane(a, b) for a, b in pairs], np.uint32).reshape(w.exec.shape)
    assert np.array_equal(got[w.exec], expected[w.exec])


def pair(low: Array, high: Array) -> Array:
    return low.view(np.uint16).astype(np.uint32) | high.view(np.uint16).astype(np.uint32) << 16


CROSSED = "op_sel:[1,0] op_sel_hi:[0,1]"


def test_packed_floats() -> None:
    w, (a, b, c, d) = new_waves(), random_inputs("f32", "f32", "f32", "f32")
    for number, values in enumerate((a, b, c, d)):
        set_vector(w, number, values)
    execute(
        w,
        f"v_pk_add_f32 v[8:9], v[0:1], v[2:3] {CROSSED} neg_lo:[0,1] neg_hi:[0,1]",
        "v_pk_mul_f32 v[10:11], v[0:1], v[2:3] op_sel_hi:[1,0]",
        "v_pk_mov_b32 v[12:13], v[0:1], v[2:3] op_sel:[1,0]",
    )
    got = [vector(w, number, np.float32) for number in range(8, 14)]
    with np.errstate(all="ignore"):
        expected = (b - c, a - d, a * c, b * c, b, c)
    for one, two in zip(got, expected, strict=True):
        assert np.array_equal(one, two, equal_nan=True)


def test_packed_halves() -> None:
    w, (a, b, c, d) = new_waves(), random_inputs("f16", "f16", "f16", "f16")
    set_vector(w, 0, pair(a, b))
    set_vector(w, 2, pair(c, d))
    execute(w, "v_pk_add_f16 v8, v0, v2", "v_pk_mul_f16 v9, v0, v2 op_sel_hi:[0,1]")
    execute(w, "v_pack_b32_f16 v10, v0, v2 op_sel:[1,0,0]")
    with np.errstate(all="ignore"):
        expected = ((a + c, b + d), (a * c, a * d), (b, c))
    for number, (low, high) in enumerate(expected, start=8):
        bits = vector(w, number, np.uint32)
        halves = [(bits >> shift).astype(np.uint16).view(np.float16) for shift in (0, 16)]
        assert np.array_equal(halves[0], low, equal_nan=True)
        assert np.array_equal(halves[1], high, equal_nan=True)


@pytest.mark.parametrize(
    ("made", "dtype"),
    [(FP8, torch.float8_e4m3fnuz), (BF8, torch.float8_e5m2fnuz)],
    ids=["fp8", "bf8"],
)
def test_8_bit_floats_are_torchs(made: Any, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(dtype).float()
    assert np.array_equal(made.decoded(codes.numpy()), values.numpy(), equal_nan=True)
    draw = torch.Generator().manual_seed(1)
    x = torch.cat([torch.randn(4000, generator=draw) * s for s in (1e-3, 1, 100)])
    middles = (values[1:127] + values[2:128]) / 2
    x = torch.cat([x, values, middles, -middles, torch.tensor([float("inf"), float("nan"), 1e9])])
    assert np.array_equal(made.encoded(x.numpy()), x.to(dtype).view(torch.uint8).numpy())


def test_conversion_of_pairs_of_8_bit_floats() -> None:
    w, (a, b) = new_waves(), random_inputs("f16", "f16")
    for number, values in enumerate((a, b)):
        set_vector(w, 2 * number, np.clip(np.nan_to_num(values), -9, 9).astype(np.float32))
    execute(w, "v_cvt_pk_fp8_f32 v8, v0, v2", "v_cvt_pk_f32_fp8_e32 v[10:11], v8")
    for number, source in ((10, 0), (11, 2)):
        expected = FP8.decoded(FP8.encoded(vector(w, source, np.float32)))
        assert np.array_equal(vector(w, number, np.float32), expected)


def test_carries_and_masks() -> None:
    w, (a, b, c, d) = new_waves(), random_inputs("u32", "u32", "u32", "u32")
    for number, values in enumerate((a, b, c, d)):
        set_vector(w, number, values)
    execute(
        w,
        "v_add_co_u32_e32 v8, vcc, v0, v2",
        "v_addc_co_u32_e32 v9, vcc, v1, v3, vcc",
        "v_sub_co_u32_e64 v10, s[4:5], v0, v2",
        "v_subb_co_u32_e64 v11, s[4:5], v1, v3, s[4:5]",
        "v_cmp_lt_u32_e64 s[6:7], v0, v2",
        "v_cndmask_b32_e64 v12, v0, v2, s[6:7]",
    )
    x, y = (low.astype(object) + (high.astype(object) << 32) for low, high in ((a, b), (c, d)))
    assert (vector(w, 8, np.uint64) == ((x + y) & M64).astype(np.uint64)).all()
    assert (vector(w, 10, np.uint64) == ((x - y) & M64).astype(np.uint64)).all()
    assert (w.mask(4) == (x < y)).all()
    assert (vector(w, 12, np.uint32) == np.maximum(a, c)).all()


def test_comparisons_are_false_of_lanes_that_are_off() -> None:
    w, (a, b) = new_waves(), random_inputs("f32", "f32")
    set_vector(w, 0, a)
    set_vector(w, 2, b)
    w.exec[:, 1::2] = False
    execute(w, "v_cmp_nlt_f32_e32 vcc, v0, v2", "v_cmp_u_f32_e64 s[4:5], v0, v2")
    with np.errstate(all="ignore"):
        assert np.array_equal(w.mask(106), ~(a < b) & w.exec)
    assert np.array_equal(w.mask(4), (np.isnan(a) | np.isnan(b)) & w.exec)


def test_classes_of_floats() -> None:
    w = new_waves()
    values = [np.nan, -np.inf, -1, -1e-40, -0.0, 0.0, 1e-40, 1, np.inf]
    set_vector(w, 0, np.resize(np.array(values, np.float32), LANES))
    for bit in range(1, 10):
        execute(w, f"v_mov_b32_e32 v2, {1 << bit}", "v_cmp_class_f32_e32 vcc, v0, v2")
        assert np.array_equal(w.mask(106)[0], np.arange(LANES) % 9 == bit - 1), bit


@pytest.mark.parametrize("line", ["v_frobnicate_b32 v0, v1", "v_add_f32_e64 v0, v1, v2 mul:2"])
def test_the_unknown_is_refused(line: str) -> None:
    with pytest.raises(UnknownInstruction, match=r"v_frobnicate|mul"):
        execute(new_waves(), line)


def test_llvm_has_these_instructions() -> None:
    rows = [row.line for row in (*INTEGERS, *FLOATS)]
    assert are_assembled([*rows, *DIVISION, *(line for line, _ in SELECTED)])
    assert not are_assembled(["v_frobnicate_b32 v0, v1"])
