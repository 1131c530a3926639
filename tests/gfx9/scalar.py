"""Scalar instructions: arithmetic of each wave's scalar registers, and loads into them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gfx9.assembly import EXEC, Instruction, Operand
from tests.gfx9.errors import UnknownInstruction
from tests.gfx9.operands import DTYPES, WIDTH, bits_of, constant_bits
from tests.gfx9.vector_ops import (
    first_one_from_bottom,
    first_one_from_top,
    first_other_bit,
    high_half,
    reversed_bits,
)
from tests.gfx9.waves import Waves

Array = np.ndarray[Any, Any]
Run = Callable[[Waves], None]
Reader = Callable[[Waves], Array]
Row = tuple[str, str, Callable[..., Any], str]  # as in vector_ops, and how SCC is set

U32, U64 = np.uint32, np.uint64


def scalar_reader(operand: Operand, kind: str) -> Reader:
    """A scalar operand of each wave as an array (waves,), or (1,) of a constant."""
    width, dtype = WIDTH[kind], DTYPES[kind]
    if operand.kind == "s":
        if width == 64:
            return lambda w: w.scalar64(operand.first).view(dtype)
        return lambda w: w.scalar(operand.first).view(dtype)
    if operand.kind == "name":
        # The address of a function: only code that reports a failed assertion takes one.
        zero = np.zeros(1, dtype)
        return lambda w: zero
    found = constant_bits(operand, width, kind[0] == "f").reshape(-1).view(dtype)
    return lambda w: found


def scalar_writer(operand: Operand, kind: str) -> Callable[[Waves, Array], None]:
    if operand.kind != "s":
        raise UnknownInstruction(f"a scalar instruction writes to {operand.text!r}")
    if WIDTH[kind] == 64:
        return lambda w, value: w.set_scalar64(operand.first, bits_of(value, kind))
    return lambda w, value: w.set_scalar(operand.first, bits_of(value, kind))


def _field(x: Array, given: Array) -> Array:
    """s_bfe: the offset is in bits 4:0 (5:0 of 64) of the second operand, the width above it."""
    size = x.dtype.itemsize * 8
    offset, width = given & U32(size - 1), (given >> U32(16)) & U32(0x7F)
    unsigned = DTYPES[f"u{size}"]
    one = unsigned(1)
    mask = np.where(width >= size, ~unsigned(0), (one << width.astype(unsigned)) - one)
    part = (x.view(unsigned) >> offset.astype(unsigned)) & mask
    if x.dtype.kind == "u":
        return part
    sign = np.where(width > 0, one << (np.maximum(width, 1) - 1).astype(unsigned), unsigned(0))
    return ((part ^ sign) - sign).view(x.dtype)


def _shift_rows() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for size in (32, 64):
        u, i = f"u{size}", f"i{size}"
        unsigned, signed, mask = DTYPES[u], DTYPES[i], U32(size - 1)
        rows |= {
            f"s_lshl_b{size}": (
                u, f"{u} u32", lambda x, n, t=unsigned, m=mask: x << (n & m).astype(t), "nonzero"
            ),
            f"s_lshr_b{size}": (
                u, f"{u} u32", lambda x, n, t=unsigned, m=mask: x >> (n & m).astype(t), "nonzero"
            ),
            f"s_ashr_i{size}": (
                i, f"{i} u32", lambda x, n, t=signed, m=mask: x >> (n & m).astype(t), "nonzero"
            ),
        }  # fmt: skip
    return rows


def _logic_rows() -> dict[str, Row]:
    functions: dict[str, Callable[..., Any]] = {
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "andn2": lambda a, b: a & ~b,
        "orn2": lambda a, b: a | ~b,
        "nand": lambda a, b: ~(a & b),
        "nor": lambda a, b: ~(a | b),
        "xnor": lambda a, b: ~(a ^ b),
    }
    return {
        f"s_{name}_b{size}": (f"u{size}", f"u{size} u{size}", function, "nonzero")
        for name, function in functions.items()
        for size in (32, 64)
    }


def _ones(x: Array) -> Array:
    return np.bitwise_count(x).astype(U32)


def _flbit64(x: Array) -> Array:
    high, low = (x >> U64(32)).astype(U32), x.astype(U32)
    return np.where(high != 0, first_one_from_top(high), first_one_from_top(low) + U32(32))


def _ff1_64(x: Array) -> Array:
    high, low = (x >> U64(32)).astype(U32), x.astype(U32)
    return np.where(low != 0, first_one_from_bottom(low), first_one_from_bottom(high) + U32(32))


SCALAR: dict[str, Row] = {
    **_shift_rows(),
    **_logic_rows(),
    "s_mov_b32": ("u32", "u32", lambda x: x, ""),
    "s_mov_b64": ("u64", "u64", lambda x: x, ""),
    "s_not_b32": ("u32", "u32", lambda x: ~x, "nonzero"),
    "s_not_b64": ("u64", "u64", lambda x: ~x, "nonzero"),
    "s_abs_i32": ("i32", "i32", np.abs, "nonzero"),
    "s_sext_i32_i8": ("i32", "i32", lambda x: x.astype(np.int8).astype(np.int32), ""),
    "s_sext_i32_i16": ("i32", "i32", lambda x: x.astype(np.int16).astype(np.int32), ""),
    "s_brev_b32": ("u32", "u32", reversed_bits, ""),
    "s_bcnt1_i32_b32": ("u32", "u32", _ones, "nonzero"),
    "s_bcnt1_i32_b64": ("u32", "u64", _ones, "nonzero"),
    "s_bcnt0_i32_b64": ("u32", "u64", lambda x: _ones(~x), "nonzero"),
    "s_flbit_i32_b32": ("u32", "u32", first_one_from_top, ""),
    "s_flbit_i32_b64": ("u32", "u64", _flbit64, ""),
    "s_flbit_i32": ("u32", "i32", first_other_bit, ""),
    "s_ff1_i32_b32": ("u32", "u32", first_one_from_bottom, ""),
    "s_ff1_i32_b64": ("u32", "u64", _ff1_64, ""),
    "s_add_u32": ("u32", "u32 u32", np.add, "carry"),
    "s_sub_u32": ("u32", "u32 u32", np.subtract, "borrow"),
    "s_add_i32": ("i32", "i32 i32", np.add, "overflow"),
    "s_sub_i32": ("i32", "i32 i32", np.subtract, "overflow"),
    "s_mul_i32": ("i32", "i32 i32", np.multiply, ""),
    "s_mul_hi_u32": ("u32", "u32 u32", high_half, ""),
    "s_mul_hi_i32": ("i32", "i32 i32", high_half, ""),
    "s_bfe_u32": ("u32", "u32 u32", _field, "nonzero"),
    "s_bfe_i32": ("i32", "i32 u32", _field, "nonzero"),
    "s_bfe_u64": ("u64", "u64 u32", _field, "nonzero"),
    "s_bfe_i64": ("i64", "i64 u32", _field, "nonzero"),
    "s_bfm_b32": ("u32", "u32 u32", lambda n, at: ((U32(1) << (n & 31)) - U32(1)) << (at & 31), ""),
    **{
        f"s_lshl{n}_add_u32": ("u32", "u32 u32", lambda a, b, n=n: (a << U32(n)) + b, "")
        for n in (1, 2, 3, 4)
    },
    "s_pack_ll_b32_b16": ("u32", "u32 u32", lambda a, b: (a & U32(0xFFFF)) | (b << U32(16)), ""),
    "s_pack_lh_b32_b16": (
        "u32", "u32 u32", lambda a, b: (a & U32(0xFFFF)) | (b & U32(0xFFFF0000)), ""
    ),
    "s_pack_hh_b32_b16": (
        "u32", "u32 u32", lambda a, b: (a >> U32(16)) | (b & U32(0xFFFF0000)), ""
    ),
}  # fmt: skip


def _scc(rule: str, values: list[Array], result: Array) -> Array:
    """The bit that an instruction leaves for the next."""
    if rule == "nonzero":
        return result != 0
    wide = [value.astype(np.int64) for value in values]
    if rule == "carry":
        return wide[0] + wide[1] > 0xFFFFFFFF
    if rule == "borrow":
        return wide[0] < wide[1]
    return (wide[0] + wide[1] != result) & (wide[0] - wide[1] != result)


def simple(i: Instruction) -> Run:
    result, kinds, function, rule = SCALAR[i.op]
    target, *sources = i.operands
    reads = [scalar_reader(o, kind) for o, kind in zip(sources, kinds.split(), strict=True)]
    write = scalar_writer(target, result)

    def run(w: Waves) -> None:
        values = [read(w) for read in reads]
        made = function(*values)
        if rule:
            w.scc = np.array(np.broadcast_to(_scc(rule, values, made), (w.count,)))
        write(w, made)

    return run


def with_carry(i: Instruction) -> Run:
    """s_addc_u32 and s_subb_u32."""
    target, a, b = i.operands
    reads = scalar_reader(a, "u32"), scalar_reader(b, "u32")
    sign = 1 if i.op == "s_addc_u32" else -1

    def run(w: Waves) -> None:
        x, y = (read(w).astype(np.int64) for read in reads)
        total = np.broadcast_to(x + sign * (y + w.scc), (w.count,))
        w.scc = (total < 0) | (total > 0xFFFFFFFF)
        w.set_scalar(target.first, (total & 0xFFFFFFFF).astype(U32))

    return run


def extreme(i: Instruction) -> Run:
    """s_min and s_max: SCC says whether it is the first operand."""
    kind, (target, a, b) = i.op[-3:], i.operands
    reads = scalar_reader(a, kind), scalar_reader(b, kind)
    write, is_min = scalar_writer(target, kind), i.op.startswith("s_min")

    def run(w: Waves) -> None:
        x, y = np.broadcast_arrays(*(read(w) for read in reads), np.empty(w.count))[:2]
        w.scc = x < y if is_min else x > y
        write(w, np.where(w.scc, x, y))

    return run


COMPARISONS = {
    "eq": np.equal, "lg": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def compare(i: Instruction) -> Run:
    """s_cmp_*, and s_cmpk_* with a constant of 16 bits."""
    found = re.fullmatch(r"s_cmp(k?)_(\w\w)_([ui]\d\d)", i.op)
    assert found is not None
    is_short, name, kind = found.groups()
    a, b = i.operands
    first = scalar_reader(a, kind)
    second = short(b, kind) if is_short else scalar_reader(b, kind)

    def run(w: Waves) -> None:
        lanes = COMPARISONS[name](first(w), second(w))
        w.scc = np.array(np.broadcast_to(lanes, (w.count,)))

    return run


def short(operand: Operand, kind: str) -> Reader:
    """A constant of 16 bits, extended as the type says."""
    bits = np.array([operand.first & 0xFFFF], np.uint16)
    value = (bits.view(np.int16) if kind[0] == "i" else bits).astype(DTYPES[kind])
    return lambda w: value


def with_short(i: Instruction) -> Run:
    """s_movk_i32, s_addk_i32, s_mulk_i32, s_cmovk_i32."""
    target, given = i.operands
    old, value = scalar_reader(target, "i32"), short(given, "i32")
    write = scalar_writer(target, "i32")

    def run(w: Waves) -> None:
        x, y = old(w), value(w)
        if i.op == "s_addk_i32":
            total = x + y
            w.scc = _scc("overflow", [x, y], total)
            write(w, total)
        elif i.op == "s_mulk_i32":
            write(w, x * y)
        else:
            write(w, y if i.op == "s_movk_i32" else np.where(w.scc, y, x))

    return run


def select(i: Instruction) -> Run:
    """s_cselect and s_cmov."""
    kind, target = f"u{i.op[-2:]}", i.operands[0]
    a, b = (i.operands[1], i.operands[2]) if len(i.operands) == 3 else (i.operands[1], target)
    first, second, write = (
        scalar_reader(a, kind),
        scalar_reader(b, kind),
        scalar_writer(target, kind),
    )

    def run(w: Waves) -> None:
        write(w, np.where(w.scc, first(w), second(w)))

    return run


def bit_test(i: Instruction) -> Run:
    """s_bitcmp0 and s_bitcmp1."""
    found = re.fullmatch(r"s_bitcmp([01])_b(\d\d)", i.op)
    assert found is not None
    wanted, size = found.groups()
    first, second = scalar_reader(i.operands[0], f"u{size}"), scalar_reader(i.operands[1], "u32")

    def run(w: Waves) -> None:
        bits = first(w) >> (second(w) & U32(int(size) - 1)).astype(DTYPES[f"u{size}"])
        w.scc = np.array(np.broadcast_to((bits & 1) == int(wanted), (w.count,)))

    return run


def save_exec(i: Instruction) -> Run:
    """s_*_saveexec_b64: exec is kept in the destination and combined with the source."""
    target, source = i.operands
    read, name = scalar_reader(source, "u64"), i.op.split("_")[1]
    # andn2 is source & ~exec, and andn1 ~source & exec.
    functions: dict[str, Callable[..., Any]] = {
        "and": lambda s, e: s & e, "or": lambda s, e: s | e, "xor": lambda s, e: s ^ e,
        "andn2": lambda s, e: s & ~e, "orn2": lambda s, e: s | ~e, "andn1": lambda s, e: ~s & e,
        "orn1": lambda s, e: ~s | e, "nand": lambda s, e: ~(s & e), "nor": lambda s, e: ~(s | e),
        "xnor": lambda s, e: ~(s ^ e),
    }  # fmt: skip
    if name not in functions:
        raise UnknownInstruction(i.text)

    def run(w: Waves) -> None:
        old = w.scalar64(EXEC)
        made = np.broadcast_to(functions[name](read(w), old), (w.count,))
        w.set_scalar64(target.first, old)
        w.set_scalar64(EXEC, made)
        w.scc = made != 0

    return run


def load(i: Instruction) -> Run:
    """s_load_dword*: from memory into scalar registers."""
    target, base, offset = i.operands
    address, by = scalar_reader(base, "u64"), scalar_reader(offset, "u32")

    def run(w: Waves) -> None:
        # The lowest bits of an address are not used.
        at = np.broadcast_to(address(w) + by(w).astype(U64), (w.count,)) & ~U64(3)
        words = w.memory.load(at, 4 * target.count).view(U32)
        for k in range(target.count):
            w.set_scalar(target.first + k, words[:, k])

    return run


def get_place(i: Instruction) -> Run:
    write = scalar_writer(i.operands[0], "u64")
    return lambda w: write(w, np.zeros(w.count, U64))


SPECIAL: dict[str, Callable[[Instruction], Run]] = {
    **dict.fromkeys(SCALAR, simple),
    "s_addc_u32": with_carry,
    "s_subb_u32": with_carry,
    **{f"s_{name}_{kind}": extreme for name in ("min", "max") for kind in ("u32", "i32")},
    **{f"s_cmp_{n}_{t}": compare for n in COMPARISONS for t in ("u32", "i32", "u64")},
    **{f"s_cmpk_{n}_{t}": compare for n in COMPARISONS for t in ("u32", "i32")},
    **dict.fromkeys(("s_movk_i32", "s_addk_i32", "s_mulk_i32", "s_cmovk_i32"), with_short),
    **dict.fromkeys(("s_cselect_b32", "s_cselect_b64", "s_cmov_b32", "s_cmov_b64"), select),
    **{f"s_bitcmp{bit}_b{size}": bit_test for bit in (0, 1) for size in (32, 64)},
    **{f"s_load_dword{size}": load for size in ("", "x2", "x4", "x8", "x16")},
    "s_getpc_b64": get_place,
}
