"""Floating-point arithmetic that numpy does not have: fused, approximate, scaled and 8-bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Bits of the mantissa, the largest exponent, and the type of the bits.
EXPONENT = {
    np.dtype(np.float32): (23, 0xFF, np.uint32),
    np.dtype(np.float64): (52, 0x7FF, np.uint64),
}


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding."""
    if a.dtype == np.float16:
        return (a.astype(np.float64) * b + c).astype(np.float16)
    if a.dtype == np.float64:
        return _fma64(a, b, c)
    product = a.astype(np.float64) * b  # exact
    total, error = _two_sum(product, c.astype(np.float64))
    # Round to odd, so that the rounding to float32 that follows is the only one.
    bits = total.view(np.int64)
    is_even = (bits & 1) == 0
    away = (error > 0) == (total > 0)
    adjusted = np.where((error != 0) & is_even, bits + np.where(away, 1, -1), bits)
    made = np.where(np.isfinite(error), adjusted.view(np.float64), total)
    return made.astype(np.float32)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    rest = total - a
    return total, (a - (total - rest)) + (b - rest)


def _fma64(a: Array, b: Array, c: Array) -> Array:
    """The error of the product is added at the end: off by less than an ulp of the exact sum."""
    product = a * b
    parts = [_split(x) for x in (a, b)]
    (ah, al), (bh, bl) = parts
    error = ((ah * bh - product) + ah * bl + al * bh) + al * bl
    total, rest = _two_sum(product, c)
    made = total + (rest + error)
    return np.where(np.isfinite(error) & np.isfinite(made), made, product + c)


def _split(x: Array) -> tuple[Array, Array]:
    scaled = x * 134217729.0
    high = scaled - (scaled - x)
    return high, x - high


def via_f64(function: Any) -> Any:
    """A function computed in double precision and rounded: within the unit's error of one ulp."""
    return lambda x: function(x.astype(np.float64)).astype(x.dtype)


def exponent(x: Array) -> Array:
    """The biased exponent."""
    shift, mask, bits = EXPONENT[x.dtype]
    return (x.view(bits) >> bits(shift)).astype(np.int64) & mask


def ldexp(x: Array, by: Any) -> Array:
    """Scale by a power of two with one rounding."""
    return np.ldexp(x, np.asarray(by, np.int32)).astype(x.dtype)


def frexp_exponent(x: Array) -> Array:
    mantissa, found = np.frexp(x)
    return np.where(np.isfinite(mantissa), found, 0)


def frexp_mantissa(x: Array) -> Array:
    return np.where(np.isfinite(x), np.frexp(x)[0], x)


def fract(x: Array) -> Array:
    """The part after the point, below 1."""
    largest = np.nextafter(x.dtype.type(1), x.dtype.type(0))
    return np.where(np.isfinite(x), np.minimum(x - np.floor(x), largest), np.nan).astype(x.dtype)


@cache
def _two_over_pi() -> int:
    """The first 1201 bits of 2 / pi after the point."""

    def inverse_tangent(n: int) -> int:
        total, power, k = 0, (1 << 1400) // n, 1
        while power:
            total += power // k if k % 4 == 1 else -(power // k)
            power //= n * n
            k += 2
        return total

    pi = 16 * inverse_tangent(5) - 4 * inverse_tangent(239)
    return (1 << 1400 + 1 + 1201) // pi


def trig_preop(x: Array, segment: Array) -> Array:
    """53 bits of 2 / pi, those that matter to the product with a number of this size."""
    power = exponent(x)
    shift = (segment & 31).astype(np.int64) * 53 + np.maximum(power - 1077, 0)
    shift, power = np.broadcast_arrays(shift, power)
    scale = -53 - shift + np.where(power >= 1968, 128, 0)
    bits = _two_over_pi()
    parts = [float(bits >> 1201 - 53 - int(by) & (1 << 53) - 1) for by in shift.flat]
    return np.ldexp(np.array(parts).reshape(shift.shape), scale.astype(np.int32))


def is_denormal(x: Array) -> Array:
    return (exponent(x) == 0) & (x != 0)


def div_scale(numbers: Array, below: Array, above: Array) -> tuple[Array, Array]:
    """Scale the numerator or the denominator, and say whether the quotient is to be scaled back.

    `numbers` is the one of the other two that is scaled.
    """
    is_double = numbers.dtype == np.float64
    by, far, tiny = (128, 768, 53) if is_double else (64, 96, 23)
    is_below, is_above = numbers == below, numbers == above
    quotient, inverse = above / below, 1 / below
    up, down = ldexp(numbers, by), ldexp(numbers, -by)
    rows = [
        ((above == 0) | (below == 0), np.nan, False),
        (exponent(above) - exponent(below) >= far, np.where(is_below, up, numbers), True),
        (is_denormal(below), up, False),
        # The ISA's text says "up" here, by which such a denominator would become infinite.
        (is_denormal(inverse) & is_denormal(quotient), np.where(is_below, down, numbers), True),
        (is_denormal(inverse), down, False),
        (is_denormal(quotient), np.where(is_above, up, numbers), True),
        (exponent(above) <= tiny, up, False),
    ]
    conditions = np.broadcast_arrays(*(row[0] for row in rows))
    values = [np.broadcast_to(row[1], conditions[0].shape) for row in rows]
    flags = [np.broadcast_to(row[2], conditions[0].shape) for row in rows]
    scaled = np.select(conditions, values, np.broadcast_to(numbers, conditions[0].shape))
    return scaled.astype(numbers.dtype), np.select(conditions, flags, False)


def div_fmas(a: Array, b: Array, c: Array, is_scaled: Array) -> Array:
    """The last step of a division, scaled back where div_scale said so."""
    by, middle = (128, 1023) if c.dtype == np.float64 else (64, 127)
    found = fma(a, b, c)
    back = np.where(exponent(c) > middle, by, -by)
    return np.where(is_scaled, ldexp(found, back), found)


def div_fixup(quotient: Array, below: Array, above: Array) -> Array:
    """The quotient with the special cases of a division."""
    far = -1075 if quotient.dtype == np.float64 else -150
    sign = np.where(np.signbit(below) ^ np.signbit(above), -1.0, 1.0)
    underflows = exponent(above) - exponent(below) < far
    rows = [
        (np.isnan(above) | np.isnan(below), np.nan),
        ((below == 0) & (above == 0) | np.isinf(below) & np.isinf(above), np.nan),
        ((below == 0) | np.isinf(above), sign * np.inf),
        (np.isinf(below) | (above == 0) | underflows, sign * 0.0),
        (np.isnan(quotient), sign * np.inf),  # steps before this one overflowed
    ]
    conditions = np.broadcast_arrays(*(row[0] for row in rows), quotient == quotient)[:-1]
    values = [np.broadcast_to(row[1], conditions[0].shape) for row in rows]
    otherwise = np.broadcast_to(sign * np.abs(quotient), conditions[0].shape)
    return np.select(conditions, values, otherwise).astype(quotient.dtype)


def float_class(x: Array, mask: Array) -> Array:
    """Whether a number is of one of the classes in a mask."""
    negative, zero, denormal = np.signbit(x), x == 0, is_denormal(x)
    mantissa = x.view(EXPONENT[x.dtype][2]) >> EXPONENT[x.dtype][2](EXPONENT[x.dtype][0] - 1)
    is_quiet = np.isnan(x) & ((mantissa & 1) == 1)
    normal = np.isfinite(x) & ~zero & ~denormal
    classes = [
        np.isnan(x) & ~is_quiet, is_quiet, negative & np.isinf(x), negative & normal,
        negative & denormal, negative & zero, ~negative & zero, ~negative & denormal,
        ~negative & normal, ~negative & np.isinf(x),
    ]  # fmt: skip
    found: Array = np.zeros(np.broadcast(x, mask).shape, bool)
    for bit, belongs in enumerate(classes):
        found = found | (belongs & ((mask >> np.uint32(bit)) & 1).astype(bool))
    return found


def median(a: Array, b: Array, c: Array) -> Array:
    """The middle of three; with a NaN, the least of the others."""
    low, high = np.fmin(a, b), np.fmax(a, b)
    middle = np.fmax(low, np.fmin(high, c))
    least = np.fmin(low, c)
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), least, middle)


def clamped_to(x: Array, kind: Any) -> Array:
    """Conversion to integers: toward zero, saturating, NaN to zero."""
    limits = np.iinfo(kind)
    wide = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0))
    return np.clip(wide, limits.min, limits.max).astype(kind)


def toward_zero_f16(x: Array) -> Array:
    """float32 -> float16, rounded toward zero."""
    nearest = x.astype(np.float16)
    is_past = np.abs(nearest.astype(np.float32)) > np.abs(x)
    return np.where(is_past, np.nextafter(nearest, np.float16(0)), nearest)


class Float8:
    """A float format of gfx942: eight bits, no infinity, no negative zero, NaN is 0x80."""

    def __init__(self, exponent_bits: int, mantissa_bits: int) -> None:
        bias, codes = 1 << exponent_bits - 1, np.arange(128)
        power, mantissa = codes >> mantissa_bits, codes & (1 << mantissa_bits) - 1
        fraction = mantissa / (1 << mantissa_bits)
        sizes = np.where(power > 0, 1 + fraction, fraction) * 2.0 ** (np.maximum(power, 1) - bias)
        self.sizes = sizes
        self.values = np.concatenate([sizes, -sizes]).astype(np.float32)
        self.values[128] = np.nan

    def decoded(self, codes: Array) -> Array:
        found: Array = self.values[codes]
        return found

    def encoded(self, x: Array) -> Array:
        """Round to the nearest, ties to even; what is too large becomes NaN."""
        size = np.abs(x.astype(np.float64))
        code = np.searchsorted(self.sizes, size)
        above, below = np.minimum(code, 127), np.maximum(code - 1, 0)
        distance = (size - self.sizes[below]) - (self.sizes[above] - size)
        is_up = (distance > 0) | (distance == 0) & (above % 2 == 0)
        found = np.where(is_up, above, below)
        limit = self.sizes[127] + (self.sizes[127] - self.sizes[126]) / 2
        found = np.where(np.signbit(x) & (found > 0), found + 128, found)
        return np.where((size >= limit) | np.isnan(x), 128, found).astype(np.uint8)


FP8, BF8 = Float8(4, 3), Float8(5, 2)
