"""Operands as typed arrays: readers and writers of registers with all modifiers of an encoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gfx9.assembly import Instruction, Operand
from tests.gfx9.errors import UnknownInstruction
from tests.gfx9.lanes import dpp_lanes, dpp_written
from tests.gfx9.waves import Waves, halves, joined

Array = np.ndarray[Any, Any]
Reader = Callable[[Waves], Array]
Writer = Callable[[Waves, Array, Array], None]

DTYPES = {
    "u16": np.uint16, "i16": np.int16, "f16": np.float16,
    "u32": np.uint32, "i32": np.int32, "f32": np.float32,
    "u64": np.uint64, "i64": np.int64, "f64": np.float64,
}  # fmt: skip
WIDTH = {name: np.dtype(dtype).itemsize * 8 for name, dtype in DTYPES.items()}
BITS = {16: np.uint16, 32: np.uint32, 64: np.uint64}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}
ONE_OVER_TWO_PI = 0.15915494309189532
SELECTED = {
    "DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16),
    **{f"BYTE_{k}": (8 * k, 8) for k in range(4)},
}  # fmt: skip


def constant_bits(operand: Operand, width: int, is_float: bool) -> Array:
    """The bits of an inline constant or a literal."""
    if operand.kind == "float":
        value = float(operand.text)
        value = ONE_OVER_TWO_PI if abs(value - ONE_OVER_TWO_PI) < 1e-7 else value
        return np.array([[value]], FLOATS[width]).view(BITS[width])
    if operand.kind != "int":
        raise UnknownInstruction(f"{operand.text!r} is not a number")
    number = operand.first
    if width == 64 and is_float and operand.text.startswith("0x"):
        number <<= 32  # a literal of a double is its upper half
    return np.array([[number & (1 << width) - 1]], BITS[width])


def raw_reader(operand: Operand, width: int, is_float: bool = False) -> Reader:
    """The bits of an operand of 32 or 64 bits, broadcast over lanes if it is scalar."""
    kind, first = operand.kind, operand.first
    if kind in ("v", "a"):
        if width == 64:
            return lambda w: joined(w.vectors[kind][first], w.vectors[kind][first + 1])
        return lambda w: w.vectors[kind][first]
    if kind == "s":
        if width == 64:
            return lambda w: w.scalar64(first)[:, None]
        return lambda w: w.scalar(first)[:, None]
    found = constant_bits(operand, width, is_float)
    return lambda w: found


@dataclass(frozen=True, slots=True)
class Source:
    """How one source of an instruction is selected: by SDWA, DPP or op_sel."""

    select: str = "DWORD"
    moves: tuple[Array, Array, bool] | None = None  # DPP: lanes, which exist, zero where none
    is_high: bool = False  # op_sel: the upper half of the register


def source_of(instruction: Instruction, number: int, width: int) -> Source:
    """The selection for source operand `number`."""
    moves = None
    if instruction.encoding == "dpp" and number == 0:
        moves = (*dpp_lanes(instruction), instruction.flag("bound_ctrl"))
    if instruction.encoding == "sdwa" and number < 2:
        return Source(instruction.modifiers.get(f"src{number}_sel", "DWORD"))
    high = instruction.bits("op_sel", (0,) * 4) if width == 16 else (0,) * 4
    return Source(moves=moves, is_high=number < len(high) and bool(high[number]))


def reader(operand: Operand, kind: str, source: Source | None = None) -> Reader:
    """The operand as an array of a type, with its modifiers applied."""
    source = source or Source()
    width = WIDTH[kind]
    is_constant = operand.kind in ("int", "float")
    read = raw_reader(operand, width if is_constant else max(width, 32), kind[0] == "f")
    if source.moves is not None:
        read = _moved(read, source.moves)
    if source.select != "DWORD":
        read = _selected(read, *SELECTED[source.select], operand.extended)
    if width == 16 and not is_constant:
        read = _narrowed(read, 16 if source.is_high else 0)
    if operand.absolute or operand.negative:
        read = _signed(read, width, operand)
    dtype = DTYPES[kind]
    if dtype == BITS[width]:
        return read
    return lambda w: read(w).view(dtype)


def _moved(read: Reader, moves: tuple[Array, Array, bool]) -> Reader:
    lanes, exists, gives_zero = moves

    def run(w: Waves) -> Array:
        bits = np.broadcast_to(read(w), w.exec.shape)[:, lanes]
        return np.where(exists & w.exec[:, lanes], bits, np.uint32(0)) if gives_zero else bits

    return run


def _selected(read: Reader, shift: int, size: int, extended: bool) -> Reader:
    def run(w: Waves) -> Array:
        part = (read(w) >> np.uint32(shift)) & np.uint32((1 << size) - 1)
        return _extended(part, size) if extended else part

    return run


def _extended(part: Array, size: int) -> Array:
    left = np.int32(32 - size)
    return ((part.view(np.int32) << left) >> left).view(np.uint32)


def _narrowed(read: Reader, shift: int) -> Reader:
    return lambda w: (read(w) >> np.uint32(shift)).astype(np.uint16)


def _signed(read: Reader, width: int, operand: Operand) -> Reader:
    bits = BITS[width]
    sign = bits(1 << width - 1)

    def run(w: Waves) -> Array:
        found = read(w)
        found = found & ~sign if operand.absolute else found
        return found ^ sign if operand.negative else found

    return run


def bits_of(value: Array, kind: str) -> Array:
    """A result as unsigned bits of its own width."""
    return np.asarray(value).astype(DTYPES[kind], copy=False).view(BITS[WIDTH[kind]])


def write_register(w: Waves, operand: Operand, offset: int, bits: Array, mask: Array) -> None:
    np.copyto(w.vectors[operand.kind][operand.first + offset], bits, where=mask)


def writer(operand: Operand, kind: str, instruction: Instruction) -> Writer:
    """Writes results of a type to a vector register, in the lanes of a mask."""
    if operand.kind not in ("v", "a"):
        raise UnknownInstruction(f"{instruction.text!r} writes to {operand.text!r}")
    width = WIDTH[kind]
    select = instruction.modifiers.get("dst_sel", "DWORD")
    high = instruction.bits("op_sel", ()) if width == 16 else ()
    if select != "DWORD" or high[3:4] == (1,) or (len(high) == 2 and high[1] == 1):
        return _part_writer(operand, kind, "WORD_1" if select == "DWORD" else select, instruction)

    def run(w: Waves, value: Array, mask: Array) -> None:
        bits = bits_of(value, kind)
        if width == 64:
            low, upper = halves(bits)
            write_register(w, operand, 0, low, mask)
            write_register(w, operand, 1, upper, mask)
        else:
            write_register(w, operand, 0, bits.astype(np.uint32), mask)

    return run


def _part_writer(operand: Operand, kind: str, select: str, instruction: Instruction) -> Writer:
    """Writes a part of a register; the rest is kept, zeroed or filled with the sign."""
    shift, size = SELECTED[select]
    unused = instruction.modifiers.get("dst_unused", "UNUSED_PRESERVE")
    part_mask = np.uint32((1 << size) - 1 << shift)

    def run(w: Waves, value: Array, mask: Array) -> None:
        part = bits_of(value, kind).astype(np.uint32) & np.uint32((1 << size) - 1)
        bits = part << np.uint32(shift)
        if unused == "UNUSED_PRESERVE":
            bits = bits | (w.vectors[operand.kind][operand.first] & ~part_mask)
        elif unused == "UNUSED_SEXT":
            bits = _extended(part, size) << np.uint32(shift)
        write_register(w, operand, 0, bits, mask)

    return run


def written_lanes(instruction: Instruction) -> Reader:
    """The lanes that an instruction writes: exec, and for DPP those it has a source for."""
    if instruction.encoding != "dpp":
        return lambda w: w.exec
    lanes, exists = dpp_lanes(instruction)
    enabled = dpp_written(instruction)
    if instruction.flag("bound_ctrl"):
        return lambda w: w.exec & enabled
    return lambda w: w.exec & enabled & exists & w.exec[:, lanes]


def check_modifiers(instruction: Instruction, known: str) -> None:
    """Raise for a modifier that would be ignored."""
    names = set(known.split())
    for name in instruction.modifiers:
        if name not in names:
            raise UnknownInstruction(f"the modifier {name!r} of {instruction.text!r}")
