"""Vector instructions: those of the table, and those that use masks, carries and single lanes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gfx9 import floats
from tests.gfx9.assembly import EXEC, VCC, Instruction, Operand
from tests.gfx9.errors import UnknownInstruction
from tests.gfx9.operands import (
    WIDTH,
    Reader,
    bits_of,
    check_modifiers,
    reader,
    source_of,
    write_register,
    writer,
    written_lanes,
)
from tests.gfx9.vector_ops import VECTOR
from tests.gfx9.waves import Waves

Array = np.ndarray[Any, Any]
Run = Callable[[Waves], None]

DPP = """quad_perm row_shl row_shr row_ror row_mirror row_half_mirror row_newbcast row_bcast
wave_shl wave_shr wave_rol wave_ror row_mask bank_mask bound_ctrl"""
SDWA = "dst_sel dst_unused src0_sel src1_sel"
KNOWN = f"{DPP} {SDWA} clamp op_sel"
SATURATING = {"v_add_u32": 1, "v_sub_u32": -1, "v_add_u16": 1, "v_sub_u16": -1}


def readers_of(i: Instruction, kinds: list[str], operands: tuple[Operand, ...]) -> list[Reader]:
    """Typed readers of the source operands."""
    if len(kinds) != len(operands):
        raise UnknownInstruction(f"{i.text!r} has {len(operands)} operands, not {len(kinds)}")
    return [
        reader(operand, kind, source_of(i, number, WIDTH[kind]))
        for number, (kind, operand) in enumerate(zip(kinds, operands, strict=True))
    ]


def simple(i: Instruction) -> Run:
    """An instruction of the table."""
    check_modifiers(i, KNOWN)
    result, given, function = VECTOR[i.op]
    kinds = given.split()
    target, *sources = i.operands
    if kinds[-1] == "dst":
        kinds[-1] = result
        sources.append(target)
    reads = readers_of(i, kinds, tuple(sources))
    write, lanes = writer(target, result, i), written_lanes(i)
    if i.flag("clamp"):
        function = _clamped(i, function, result)

    def run(w: Waves) -> None:
        write(w, function(*(read(w) for read in reads)), lanes(w))

    return run


def _clamped(i: Instruction, function: Callable[..., Any], result: str) -> Callable[..., Any]:
    """Results kept in [0, 1], or integers that do not wrap around."""
    if result[0] == "f":
        return lambda *args: np.clip(np.nan_to_num(function(*args), nan=0.0), 0, 1)
    if i.op not in SATURATING:
        raise UnknownInstruction(f"clamp of {i.text!r}")
    sign, limit = SATURATING[i.op], (1 << WIDTH[result]) - 1
    return lambda a, b: np.clip(a.astype(np.int64) + sign * b.astype(np.int64), 0, limit)


def mask_reader(operand: Operand) -> Reader:
    if operand.kind == "s":
        return lambda w: w.mask(operand.first)
    # -1 stands for all lanes, 0 for none.
    return lambda w: np.full(w.exec.shape, bool(operand.first))


def cndmask(i: Instruction) -> Run:
    check_modifiers(i, f"{DPP} {SDWA}")
    target, a, b, chosen = i.operands
    first, second = readers_of(i, ["u32", "u32"], (a, b))
    write, lanes, mask = writer(target, "u32", i), written_lanes(i), mask_reader(chosen)

    def run(w: Waves) -> None:
        write(w, np.where(mask(w), second(w), first(w)), lanes(w))

    return run


def carry(i: Instruction) -> Run:
    """Additions and subtractions that take or give a carry."""
    check_modifiers(i, f"{DPP} {SDWA}")
    target, out, a, b, *given = i.operands
    reads = readers_of(i, ["u32", "u32"], (a, b))
    write, lanes = writer(target, "u32", i), written_lanes(i)
    brought = mask_reader(given[0]) if given else None
    is_reversed, sign = "rev" in i.op, 1 if i.op.startswith("v_add") else -1

    def run(w: Waves) -> None:
        x, y = (read(w).astype(np.int64) for read in reads)
        x, y = (y, x) if is_reversed else (x, y)
        total = x + sign * (y if brought is None else y + brought(w))
        flags = np.broadcast_to((total < 0) | (total >> 32 != 0), w.exec.shape)
        mask = lanes(w)
        write(w, (total & 0xFFFFFFFF).astype(np.uint32), mask)
        w.set_mask(out.first, flags & mask)

    return run


COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lg": lambda a, b: (a < b) | (a > b),
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "neq": np.not_equal, "nlg": lambda a, b: ~((a < b) | (a > b)),
    "nlt": lambda a, b: ~(a < b), "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b), "nge": lambda a, b: ~(a >= b),
    "o": lambda a, b: (a == a) & (b == b), "u": lambda a, b: (a != a) | (b != b),
    "t": lambda a, b: np.broadcast_to(True, np.broadcast(a, b).shape),
    "tru": lambda a, b: np.broadcast_to(True, np.broadcast(a, b).shape),
    "f": lambda a, b: np.broadcast_to(False, np.broadcast(a, b).shape),
    "class": floats.float_class,
}  # fmt: skip


def compare(i: Instruction) -> Run:
    """v_cmp_* and v_cmpx_*: a bit of each lane; of lanes that are off, zero."""
    check_modifiers(i, SDWA)
    found = re.fullmatch(r"v_cmp(x?)_([a-z]+)_([uif]\d+)", i.op)
    if found is None or found.group(2) not in COMPARISONS:
        raise UnknownInstruction(i.text)
    is_exec, name, kind = found.groups()
    target, a, b = i.operands
    reads = readers_of(i, [kind, "u32" if name == "class" else kind], (a, b))
    function = COMPARISONS[name]

    def run(w: Waves) -> None:
        lanes = function(*(read(w) for read in reads)) & w.exec
        w.set_mask(target.first, lanes)
        if is_exec:
            w.set_mask(EXEC, lanes)

    return run


def div_scale(i: Instruction) -> Run:
    check_modifiers(i, "")
    kind = i.op[-3:]
    target, out, *sources = i.operands
    reads = readers_of(i, [kind] * 3, tuple(sources))
    write = writer(target, kind, i)

    def run(w: Waves) -> None:
        scaled, flags = floats.div_scale(*(read(w) for read in reads))
        write(w, scaled, w.exec)
        w.set_mask(out.first, np.broadcast_to(flags, w.exec.shape) & w.exec)

    return run


def div_fmas(i: Instruction) -> Run:
    check_modifiers(i, "")
    kind = i.op[-3:]
    target, *sources = i.operands
    reads = readers_of(i, [kind] * 3, tuple(sources))
    write = writer(target, kind, i)

    def run(w: Waves) -> None:
        write(w, floats.div_fmas(*(read(w) for read in reads), w.mask(VCC)), w.exec)

    return run


def wide_multiply_add(i: Instruction) -> Run:
    """v_mad_u64_u32 and v_mad_i64_i32; the carry is the 65th bit."""
    check_modifiers(i, "")
    sign = i.op[6]
    target, out, a, b, c = i.operands
    reads = readers_of(i, [f"{sign}32", f"{sign}32", f"{sign}64"], (a, b, c))
    write = writer(target, f"{sign}64", i)
    wide = np.int64 if sign == "i" else np.uint64

    def run(w: Waves) -> None:
        x, y, z = (read(w) for read in reads)
        product = x.astype(wide) * y.astype(wide)
        total = product + z
        write(w, total, w.exec)
        carried = total < product if sign == "u" else (total < product) != (z < 0)
        w.set_mask(out.first, np.broadcast_to(carried, w.exec.shape) & w.exec)

    return run


def read_lane(i: Instruction) -> Run:
    """A lane's value into a scalar register: the first active lane, or one by its number."""
    check_modifiers(i, "")
    target, source, *chosen = i.operands
    read = reader(source, "u32")
    lane_of = reader(chosen[0], "u32") if chosen else None

    def run(w: Waves) -> None:
        values = np.broadcast_to(read(w), w.exec.shape)
        lane = w.exec.argmax(axis=1) if lane_of is None else (lane_of(w) % 64).reshape(-1)
        lane = np.broadcast_to(lane, (w.count,))
        w.set_scalar(target.first, values[np.arange(w.count), lane])

    return run


def write_lane(i: Instruction) -> Run:
    """A scalar into one lane, whatever exec is."""
    check_modifiers(i, "")
    target, source, chosen = i.operands
    read, lane_of = reader(source, "u32"), reader(chosen, "u32")

    def run(w: Waves) -> None:
        lane = np.broadcast_to((lane_of(w) % 64).reshape(-1), (w.count,))
        value = np.broadcast_to(read(w).reshape(-1), (w.count,))
        w.vectors[target.kind][target.first][np.arange(w.count), lane] = value

    return run


def swap(i: Instruction) -> Run:
    check_modifiers(i, "")
    a, b = i.operands
    reads = reader(a, "u32"), reader(b, "u32")

    def run(w: Waves) -> None:
        x, y = (read(w).copy() for read in reads)
        write_register(w, a, 0, bits_of(y, "u32"), w.exec)
        write_register(w, b, 0, bits_of(x, "u32"), w.exec)

    return run


SPECIAL: dict[str, Callable[[Instruction], Run]] = {
    "v_cndmask_b32": cndmask,
    **{
        f"v_{name}_co_u32": carry
        for name in ("add", "addc", "sub", "subb", "subrev", "subbrev")
    },
    "v_div_scale_f32": div_scale,
    "v_div_scale_f64": div_scale,
    "v_div_fmas_f32": div_fmas,
    "v_div_fmas_f64": div_fmas,
    "v_mad_u64_u32": wide_multiply_add,
    "v_mad_i64_i32": wide_multiply_add,
    "v_readfirstlane_b32": read_lane,
    "v_readlane_b32": read_lane,
    "v_writelane_b32": write_lane,
    "v_swap_b32": swap,
    **dict.fromkeys(VECTOR, simple),
}  # fmt: skip
