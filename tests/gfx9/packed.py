"""Packed instructions: two results from halves of the operands, and mixed and 8-bit conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gfx9.assembly import Instruction, Operand
from tests.gfx9.floats import BF8, FP8, Float8, fma
from tests.gfx9.operands import (
    BITS,
    DTYPES,
    WIDTH,
    Reader,
    bits_of,
    check_modifiers,
    constant_bits,
    raw_reader,
    reader,
    source_of,
    write_register,
    writer,
)
from tests.gfx9.waves import Waves

Array = np.ndarray[Any, Any]
Run = Callable[[Waves], None]
Binary = Callable[..., Any]


def _shift_left(n: Array, x: Array) -> Array:
    return x << (n & n.dtype.type(15))


def _shift_right(n: Array, x: Array) -> Array:
    return x >> (n & n.dtype.type(15)).astype(x.dtype)


PACKED: dict[str, tuple[str, Binary]] = {
    **{
        f"v_pk_{name}_{t}": (t, function)
        for t in ("f32", "f16")
        for name, function in (("add", np.add), ("mul", np.multiply), ("fma", fma))
    },
    "v_pk_max_f16": ("f16", np.fmax),
    "v_pk_min_f16": ("f16", np.fmin),
    **{
        f"v_pk_{name}_{t}": (t, function)
        for t in ("u16", "i16")
        for name, function in (
            ("add", np.add),
            ("sub", np.subtract),
            ("max", np.maximum),
            ("min", np.minimum),
            ("mad", lambda a, b, c: a * b + c),
        )
    },
    "v_pk_mul_lo_u16": ("u16", np.multiply),
    "v_pk_lshlrev_b16": ("u16", _shift_left),
    "v_pk_lshrrev_b16": ("u16", _shift_right),
    "v_pk_ashrrev_i16": ("i16", _shift_right),
    "v_pk_mov_b32": ("u32", lambda a, b: (a, b)),
}


def _half(operand: Operand, kind: str, is_high: bool, is_negative: bool) -> Reader:
    """One half of an operand: a register of a pair, or 16 bits of a register."""
    width = WIDTH[kind]
    bits = BITS[width]
    if operand.kind in ("int", "float"):
        # An inline constant is the lower half; the upper half of a 32-bit one is the same.
        found = constant_bits(operand, width, kind[0] == "f")
        is_empty = width == 16 and is_high and operand.kind == "int"
        read: Reader = lambda w: np.zeros_like(found) if is_empty else found  # noqa: E731
    elif width == 32:
        place = operand.first + int(is_high)
        read = raw_reader(Operand(operand.kind, place, 1, operand.text), 32)
    else:
        whole, shift = raw_reader(operand, 32), np.uint32(16 if is_high else 0)
        read = lambda w: (whole(w) >> shift).astype(np.uint16)  # noqa: E731
    sign = bits(1 << width - 1 if is_negative else 0)
    return lambda w: (read(w) ^ sign).view(DTYPES[kind])


def packed(i: Instruction) -> Run:
    """v_pk_*: op_sel says which half each operand gives to the lower result, op_sel_hi to the
    upper."""
    check_modifiers(i, "op_sel op_sel_hi neg_lo neg_hi")
    kind, function = PACKED[i.op]
    target, *sources = i.operands
    count = len(sources)
    choices = (
        (i.bits("op_sel", (0,) * count), i.bits("neg_lo", (0,) * count)),
        (i.bits("op_sel_hi", (1,) * count), i.bits("neg_hi", (0,) * count)),
    )
    lower, upper = (
        [
            _half(source, kind, bool(high), bool(negative))
            for source, high, negative in zip(sources, highs, negatives, strict=True)
        ]
        for highs, negatives in choices
    )
    if i.op == "v_pk_mov_b32":
        # The lower result is the first operand's, the upper one the second's.
        highs = i.bits("op_sel", (0, 0))
        lower = [_half(sources[0], kind, bool(highs[0]), False)]
        upper = [_half(sources[1], kind, bool(highs[1]), False)]
        function = lambda x: x  # noqa: E731

    def run(w: Waves) -> None:
        results = [
            bits_of(function(*(read(w) for read in reads)), kind) for reads in (lower, upper)
        ]
        if WIDTH[kind] == 32:
            results = [result.copy() for result in results]
            write_register(w, target, 0, results[0], w.exec)
            write_register(w, target, 1, results[1], w.exec)
        else:
            low, high = (result.astype(np.uint32) for result in results)
            write_register(w, target, 0, low | (high << np.uint32(16)), w.exec)

    return run


def mixed(i: Instruction) -> Run:
    """v_fma_mix*: each operand is float32, or a half of a register where op_sel_hi is set."""
    check_modifiers(i, "op_sel op_sel_hi")
    target, *sources = i.operands
    are_halves, highs = i.bits("op_sel_hi", (0,) * 3), i.bits("op_sel", (0,) * 3)
    reads = []
    for source, is_half, high in zip(sources, are_halves, highs, strict=True):
        if is_half:
            half = _half(source, "f16", bool(high), source.negative)
            reads.append(lambda w, half=half: half(w).astype(np.float32))
        else:
            reads.append(reader(source, "f32"))

    def run(w: Waves) -> None:
        made = fma(*(read(w) for read in reads))
        if i.op == "v_fma_mix_f32":
            write_register(w, target, 0, bits_of(made, "f32"), w.exec)
            return
        shift = 0 if i.op == "v_fma_mixlo_f16" else 16
        kept = w.vectors[target.kind][target.first] & np.uint32(0xFFFF << (16 - shift))
        half = bits_of(made.astype(np.float16), "f16").astype(np.uint32) << np.uint32(shift)
        write_register(w, target, 0, kept | half, w.exec)

    return run


def encode_pair(i: Instruction) -> Run:
    """v_cvt_pk_fp8_f32, v_cvt_pk_bf8_f32: two numbers into a half of the register."""
    check_modifiers(i, "op_sel")
    target, a, b = i.operands
    first, second = reader(a, "f32"), reader(b, "f32")
    format8: Float8 = FP8 if "_fp8_" in i.op else BF8
    shift = 16 if i.bits("op_sel", (0, 0, 0))[-1] else 0

    def run(w: Waves) -> None:
        low, high = (format8.encoded(read(w)).astype(np.uint32) for read in (first, second))
        kept = w.vectors[target.kind][target.first] & np.uint32(0xFFFF << (16 - shift))
        pair = (low | (high << np.uint32(8))) << np.uint32(shift)
        write_register(w, target, 0, kept | pair, w.exec)

    return run


def decode_pair(i: Instruction) -> Run:
    """v_cvt_pk_f32_fp8, v_cvt_pk_f32_bf8: the two numbers of a half of the register."""
    check_modifiers(i, "op_sel src0_sel")
    target, source = i.operands
    read = reader(source, "u32", source_of(i, 0, 32))
    format8: Float8 = FP8 if i.op.endswith("fp8") else BF8
    shift = 16 if i.bits("op_sel", (0,))[0] else 0
    write = writer(target, "u64", i)

    def run(w: Waves) -> None:
        bits = read(w) >> np.uint32(shift)
        low, high = (
            format8.decoded((bits >> np.uint32(by)) & np.uint32(0xFF)).view(np.uint32)
            for by in (0, 8)
        )
        write(w, low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32)), w.exec)

    return run


SPECIAL: dict[str, Callable[[Instruction], Run]] = {
    **dict.fromkeys(PACKED, packed),
    **dict.fromkeys(("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"), mixed),
    **dict.fromkeys(("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32"), encode_pair),
    **dict.fromkeys(("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8"), decode_pair),
}
