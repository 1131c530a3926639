"""Movement between lanes: DPP, swizzles and permutations as tables of source lanes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.gfx9.assembly import Instruction
from tests.gfx9.errors import UnknownInstruction
from tests.gfx9.waves import LANES

Array = np.ndarray[Any, Any]

LANE = np.arange(LANES)
ROW, IN_ROW = LANE // 16, LANE % 16


def _shifted(by: int, size: int) -> tuple[Array, Array]:
    """Each lane reads the lane `by` places on, inside groups of `size` lanes."""
    source = LANE + by
    return source % LANES, (source >= 0) & (source < LANES) & (source // size == LANE // size)


def _control(name: str, value: str) -> tuple[Array, Array] | None:
    """The lane that each lane reads, and whether there is one."""
    always = np.ones(LANES, bool)
    if name == "quad_perm":
        order = np.array([int(n) for n in value.strip("[]").split(",")])
        return LANE // 4 * 4 + order[LANE % 4], always
    number = int(value, 0) if value else 0
    table = {
        "row_shl": lambda: _shifted(number, 16),
        "row_shr": lambda: _shifted(-number, 16),
        "row_ror": lambda: (ROW * 16 + (IN_ROW - number) % 16, always),
        "row_mirror": lambda: (ROW * 16 + 15 - IN_ROW, always),
        "row_half_mirror": lambda: (LANE // 8 * 8 + 7 - LANE % 8, always),
        "row_newbcast": lambda: (ROW * 16 + number, always),
        "row_bcast": lambda: _broadcast(number),
        "wave_shl": lambda: _shifted(number, LANES),
        "wave_shr": lambda: _shifted(-number, LANES),
        "wave_rol": lambda: ((LANE + number) % LANES, always),
        "wave_ror": lambda: ((LANE - number) % LANES, always),
    }
    return table[name]() if name in table else None


def _broadcast(number: int) -> tuple[Array, Array]:
    """The last lane before each group of 16 (of 32) lanes is read by all of the group."""
    size = number + 1
    source = LANE // size * size - 1
    return source % LANES, source >= 0


def dpp_lanes(instruction: Instruction) -> tuple[Array, Array]:
    """The source lane of each lane, and whether it exists."""
    for name, value in instruction.modifiers.items():
        found = _control(name, value)
        if found is not None:
            return found
    raise UnknownInstruction(f"no known movement in {instruction.text!r}")


def dpp_written(instruction: Instruction) -> Array:
    """The lanes that row_mask and bank_mask leave enabled."""
    rows = int(instruction.modifiers.get("row_mask", "0xf"), 0)
    banks = int(instruction.modifiers.get("bank_mask", "0xf"), 0)
    written: Array = ((rows >> ROW) & (banks >> (IN_ROW // 4)) & 1).astype(bool)
    return written


def swizzle_lanes(text: str) -> Array:
    """The source lanes of ds_swizzle: by name, or as the bits of its offset."""
    found = re.fullmatch(r"swizzle\((\w+),(.*)\)", text.replace(" ", ""))
    if found is None:
        return _swizzle_bits(int(text or "0", 0))
    kind, given = found.groups()
    if kind == "QUAD_PERM":
        order = np.array([int(n) for n in given.split(",")])
        return LANE // 4 * 4 + order[LANE % 4]
    if kind == "BITMASK_PERM":
        return _bitmask(given.strip('"'))
    first, _, second = given.partition(",")
    size = int(first)
    lanes = {
        "SWAP": lambda: LANE ^ size,
        "REVERSE": lambda: LANE ^ (size - 1),
        "BROADCAST": lambda: LANE // size * size + int(second),
    }
    if kind not in lanes:
        raise UnknownInstruction(f"no such swizzle: {text}")
    return np.asarray(lanes[kind]())


def _bitmask(pattern: str) -> Array:
    """Five characters, of the highest bit first: 0, 1, p (kept) or i (inverted)."""
    lane = LANE.copy()
    for bit, character in zip((16, 8, 4, 2, 1), pattern, strict=True):
        if character == "0":
            lane &= ~bit
        elif character == "1":
            lane |= bit
        elif character == "i":
            lane ^= bit
    return lane


def _swizzle_bits(offset: int) -> Array:
    if offset & 0x8000:
        order = np.array([offset >> 2 * k & 3 for k in range(4)])
        return LANE // 4 * 4 + order[LANE % 4]
    kept, ones, inverted = offset & 31, offset >> 5 & 31, offset >> 10 & 31
    return LANE // 32 * 32 + (((LANE % 32) & kept | ones) ^ inverted)
