"""Functions that kernels call by name. A module gets those that its kernels use, and theirs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from perfuse.codegen.triton.spelling import NARROW_TYPE
from perfuse.ir.dtype import DType

_PLAIN = {
    "pf_sign": """
def pf_sign(x):
  return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)
""",
    "pf_floordiv": """
def pf_floordiv(a, b):
  q = a // b
  r = a - q * b
  return tl.where((r != 0) & ((r < 0) != (b < 0)), q - 1, q)
""",
    "pf_mod": """
def pf_mod(a, b):
  r = a % b
  return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
""",
    "pf_mod_float": """
def pf_mod_float(a, b):
  r = libdevice.fmod(a, b)
  return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
""",
    "pf_floordiv_float": """
def pf_floordiv_float(a, b):
  r = libdevice.fmod(a, b)
  q = (a - r) / b
  q = tl.where((r != 0) & ((r < 0) != (b < 0)), q - 1.0, q)
  near = tl.floor(q)
  near = tl.where(q - near > 0.5, near + 1.0, near)
  near = tl.where(q != 0, near, libdevice.copysign(q * 0.0, a / b))
  return tl.where(b == 0, a / b, near)
""",
    "pf_shl": """
def pf_shl(a, b):
  wide: tl.constexpr = a.dtype.primitive_bitwidth
  return tl.where((b < 0) | (b >= wide), a - a, a << b)
""",
    "pf_shr": """
def pf_shr(a, b):
  wide: tl.constexpr = a.dtype.primitive_bitwidth
  over = (b < 0) | (b >= wide)
  return a >> tl.where(over, b - b + (wide - 1), b)
""",
    "pf_pow_int": """
def pf_pow_int(base, power):
  one = base - base + 1
  result = one
  square = base
  left = tl.where(power < 0, power - power, power)
  for _ in range(6):
    result = tl.where((left & 1) != 0, result * square, result)
    square = square * square
    left = left >> 1
  # Beyond 63 only 0, 1 and -1 matter: what is left of the power says whether it is even.
  is_odd = (power & 1) != 0
  unit = tl.where((base == -1) & (is_odd == 0), one, base)
  result = tl.where((left != 0) & ((base == 0) | (base == 1) | (base == -1)), unit, result)
  result = tl.where((left != 0) & (base != 0) & (base != 1) & (base != -1), result - result, result)
  inverse = tl.where(base == 1, one, tl.where(base == -1, unit, one - one))
  return tl.where(power < 0, inverse, result)
""",
    "pf_digamma": """
def pf_digamma(given):
  x = given.to(tl.float64)
  whole = libdevice.trunc(x)
  is_below = x < 0
  y = tl.where(is_below, -3.141592653589793 / libdevice.tan(3.141592653589793 * (x - whole)), 0.0)
  z = tl.where(is_below, 1 - x, x)
  for _ in range(10):
    y = tl.where(z < 10, y - 1 / z, y)
    z = tl.where(z < 10, z + 1, z)
  s = 1 / (z * z)
  tail = 691.0 / 32760 - s / 12
  tail = 1.0 / 240 - s * (1.0 / 132 - s * tail)
  tail = s * (1.0 / 12 - s * (1.0 / 120 - s * (1.0 / 252 - s * tail)))
  y = y + libdevice.log(z) - 0.5 / z - tail
  y = tl.where(is_below & (x == whole), float('nan'), y)
  # Triton's -x is 0 - x, which loses the sign of zero.
  y = tl.where(x == 0, -libdevice.copysign(x * 0.0 + float('inf'), x), y)
  return y.to(given.dtype)
""",
    "pf_philox": """
def pf_philox(seed, index):
  # Philox4x32-10. A product of 64 bits is one instruction where its halves would be two.
  key = seed.to(tl.uint64)
  k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
  counter = index.to(tl.uint64)
  c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
  c2 = c0 ^ c0
  c3 = c2
  for _ in tl.static_range(10):
    p = c0.to(tl.uint64) * 0xD2511F53
    q = c2.to(tl.uint64) * 0xCD9E8D57
    c0, c1 = (q >> 32).to(tl.uint32) ^ c1 ^ k0, q.to(tl.uint32)
    c2, c3 = (p >> 32).to(tl.uint32) ^ c3 ^ k1, p.to(tl.uint32)
    k0 += 0x9E3779B9
    k1 += 0xBB67AE85
  return c0, c1, c2, c3
""",
    "pf_unit": """
def pf_unit(bits):
  return (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-8
""",
    "pf_rand": """
def pf_rand(seed, index):
  # Four neighbours share a call: the compiler sees that the counters of a thread's are the same.
  x0, x1, x2, x3 = pf_philox(seed, index >> 2)
  word = index.to(tl.int32) & 3
  return pf_unit(tl.where(word < 2, tl.where(word == 0, x0, x1), tl.where(word == 2, x2, x3)))
""",
    "pf_randn": """
def pf_randn(seed, index):
  x0, x1, x2, x3 = pf_philox(seed, index)
  radius = tl.sqrt_rn(tl.log(pf_unit(x0) + 5.9604644775390625e-8) * -2.0)
  return radius * libdevice.cos(pf_unit(x1) * 6.28318531)
""",
    "pf_randint": """
def pf_randint(seed, index, low, high):
  x0, x1, x2, x3 = pf_philox(seed, index)
  bits = (x1.to(tl.uint64) << 32) | x0.to(tl.uint64)
  width = tl.where(high > low, high - low, high - high + 1).to(tl.uint64)
  return ((bits % width) + low.to(tl.uint64)).to(tl.int64)
""",
    "pf_round_bf16": """
def pf_round_bf16(x):
  bits = x.to(tl.int32, bitcast=True)
  near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
  return tl.where(x == x, near.to(tl.float32, bitcast=True), x)
""",
    "pf_add": "\ndef pf_add(a, b):\n  return a + b\n",
    "pf_mul": "\ndef pf_mul(a, b):\n  return a * b\n",
    "pf_max": """
def pf_max(a, b):
  return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "pf_min": """
def pf_min(a, b):
  return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "pf_exp": """
def pf_exp(x):
  # Hardware has powers of two: what the exponent loses when it is rounded is made good for, and the
  # smallest numbers, which it makes zero, are found 64 powers higher.
  power = x * 1.4426950408889634
  lost = tl.fma(x, 1.925963033500011e-08, tl.fma(x, 1.4426950216293335, -power))
  is_small = power < -100.0
  near = tl.exp2(tl.where(is_small, power + 64.0, power))
  # From 2**128 on it is infinite, which times a loss below zero would not be a number.
  is_near = (tl.abs(lost) < 1.0) & (power < 128.0)
  near = tl.where(is_near, tl.fma(near, lost * 0.6931471805599453, near), near)
  return tl.where(is_small, near * 5.421010862427522e-20, near)
""",
    "pf_exp_mid": """
def pf_exp_mid(x):
  # exp where it does not matter whether the smallest numbers become zero, which is cheaper.
  return tl.exp2(x * 1.4426950408889634)
""",
    "pf_inverse": """
def pf_inverse(x):
  # One instruction, off by a unit in the last place; a quotient takes eight.
  return tl.inline_asm_elementwise(
    'rcp.approx.ftz.f32 $0, $1;', '=f,f', [x], dtype=tl.float32, is_pure=True, pack=1
  )
""",
    "pf_exp_below": """
def pf_exp_below(x, top):
  # exp(x - top); nothing at all where there is no top yet.
  return tl.where(top == float('-inf'), 0.0, tl.exp(x - top))
""",
    "pf_argmax": """
def pf_argmax(a, i, b, j):
  # Not a number counts as the largest; of equals the first is taken.
  is_nan = a != a
  is_equal = (a == b) | (is_nan & (b != b))
  is_first = (a > b) | (is_nan & (b == b)) | (is_equal & (i < j))
  return tl.where(is_first, a, b), tl.where(is_first, i, j)
""",
    "pf_argmin": """
def pf_argmin(a, i, b, j):
  is_nan = a != a
  is_equal = (a == b) | (is_nan & (b != b))
  is_first = (a < b) | (is_nan & (b == b)) | (is_equal & (i < j))
  return tl.where(is_first, a, b), tl.where(is_first, i, j)
""",
    "pf_first_argmax": """
def pf_first_argmax(x, at, nowhere: tl.constexpr, axis: tl.constexpr):
  # Two plain reductions are fewer instructions than one of pairs. If there is something that is not
  # a number, the largest is not one either, and nothing equals it.
  top = tl.reduce(x, axis, pf_max, keep_dims=True)
  return top, tl.min(tl.where((x == top) | (x != x), at, nowhere), axis, keep_dims=True)
""",
    "pf_first_argmin": """
def pf_first_argmin(x, at, nowhere: tl.constexpr, axis: tl.constexpr):
  top = tl.reduce(x, axis, pf_min, keep_dims=True)
  return top, tl.min(tl.where((x == top) | (x != x), at, nowhere), axis, keep_dims=True)
""",
    "pf_last_block": """
def pf_last_block(counter, programs):
  # True in the program that finishes last, which sees what all the others stored.
  tl.debug_barrier()
  seen = tl.atomic_add(counter, 1, sem='acq_rel')
  is_last = seen == programs - 1
  tl.debug_barrier()
  return is_last
""",
}


@dataclass(frozen=True, slots=True)
class _Small:
    """An FP8 type: bits of its significand, exponent bias, code of its largest number."""

    significand: int
    bias: int
    largest: int
    overflow: int
    has_one_nan: bool  # the pattern of minus zero is the only NaN
    limit: float  # numbers beyond it overflow (as far as a tie does not round down)


_SMALL = {
    DType.F8E4M3FN: _Small(3, 7, 0x7E, 0x7F, False, 464.0),
    DType.F8E5M2: _Small(2, 15, 0x7B, 0x7C, False, 61439.996),
    DType.F8E4M3FNUZ: _Small(3, 8, 0x7F, 0x80, True, 247.99998),
    DType.F8E5M2FNUZ: _Small(2, 16, 0x7F, 0x80, True, 61439.996),
}

SIGNED_NAN = frozenset(dtype for dtype, f in _SMALL.items() if not f.has_one_nan)


def _encode(dtype: DType, *, saturate: bool) -> str:
    """float32 to the bits of a small float, to the nearest, ties to even."""
    f = _SMALL[dtype]
    drop = 23 - f.significand
    least = 1 - f.bias - f.significand  # exponent of the smallest number
    nan = 0x80 if f.has_one_nan else 0x7F
    over = f.largest if saturate else f.overflow
    sign = (
        "tl.where((code == 0) | (code == 0x80), code, code | sign)"
        if f.has_one_nan
        else "code | sign"
    )
    return f"""
def pf_to_{dtype}(x):
  bits = x.to(tl.int32, bitcast=True)
  size = bits & 0x7FFFFFFF
  sign = (bits >> 24) & 0x80
  a = size.to(tl.float32, bitcast=True)
  rounded = size + {(1 << (drop - 1)) - 1} + ((size >> {drop}) & 1)
  normal = (rounded >> {drop}) - {(127 - f.bias) << f.significand}
  tiny = (a + {2.0 ** (23 + least)!r}).to(tl.int32, bitcast=True) - {(127 + 23 + least) << 23}
  code = tl.where(a < {2.0 ** (1 - f.bias)!r}, tiny, normal)
  code = tl.where(a > {f.limit!r}, {over}, code)
  code = tl.where(a != a, {nan}, code)
  return ({sign}).to(tl.uint8)
"""


def _decode(dtype: DType) -> str:
    """The bits of a small float to float32, which holds all of them."""
    f = _SMALL[dtype]
    scale = 2.0 ** (127 - f.bias)
    if dtype is DType.F8E5M2:
        special = "tl.where(size > 0x7C, float('nan'), tl.where(size == 0x7C, float('inf'), a))"
    elif f.has_one_nan:
        special = "tl.where(code == 0x80, float('nan'), a)"
    else:
        special = "tl.where(size == 0x7F, float('nan'), a)"
    return f"""
def pf_from_{dtype}(bits):
  code = bits.to(tl.int32)
  size = code & 0x7F
  a = (size << {23 - f.significand}).to(tl.float32, bitcast=True) * {scale!r}
  a = {special}
  return tl.where(code >= 0x80, -a, a)
"""


def _convert(dtype: DType, *, saturate: bool) -> str:
    """float32 to the bits of a small float by hardware, which saturates and drops NaN's sign."""
    f = _SMALL[dtype]
    limit = "float('inf')" if saturate else repr(f.limit)
    beyond = "0x7F" if f.overflow == 0x7F else f"tl.where(x == x, {f.overflow}, 0x7F)"
    return f"""
def pf_near_{dtype}(x):
  code = x.to({NARROW_TYPE[dtype]}).to(tl.uint8, bitcast=True)
  sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
  beyond = {beyond} | sign
  return tl.where(tl.abs(x) <= {limit}, code, beyond.to(tl.uint8))
"""


def _extend(dtype: DType) -> str:
    """A small float to float32 by hardware, which drops NaN's sign: the sign is restored."""
    return f"""
def pf_wide_{dtype}(x):
  sign = (x.to(tl.uint8, bitcast=True).to(tl.int32) & 0x80) << 24
  return (x.to(tl.float32).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
"""


_POWERS = {
    "pf_to_f8e8m0fnu": """
def pf_to_f8e8m0fnu(x):
  # Halfway between powers of two goes up, but to the least one, 2^-127, it goes down.
  size = tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)
  return ((size + tl.where(size < 0x800000, 0x3FFFFF, 0x400000)) >> 23).to(tl.uint8)
""",
    "pf_from_f8e8m0fnu": """
def pf_from_f8e8m0fnu(bits):
  code = bits.to(tl.int32)
  a = tl.where(code == 0, 0x400000, code << 23).to(tl.float32, bitcast=True)
  return tl.where(code == 0xFF, float('nan'), a)
""",
}


def _texts(*, saturate: bool) -> dict[str, str]:
    texts = _PLAIN | _POWERS
    for dtype in _SMALL:
        is_saturating = saturate and dtype is DType.F8E4M3FN
        texts[f"pf_to_{dtype}"] = _encode(dtype, saturate=is_saturating)
        texts[f"pf_near_{dtype}"] = _convert(dtype, saturate=is_saturating)
        texts[f"pf_from_{dtype}"] = _decode(dtype)
        texts[f"pf_wide_{dtype}"] = _extend(dtype)
    return texts


def helper_text(code: str, *, saturate: bool) -> str:
    """The helpers that some code calls, those they call first."""
    texts = _texts(saturate=saturate)
    order: list[str] = []

    def need(text: str, own: str = "") -> None:
        for name in dict.fromkeys(re.findall(r"\bpf_\w+", text)):
            if name != own and name in texts and name not in order:
                need(texts[name], name)
                order.append(name)

    need(code)
    return "".join(f"\n\n@triton.jit{texts[name]}" for name in order)
