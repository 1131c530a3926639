"""Matrix instructions (MFMA): operands gathered from lanes, multiplied, and scattered back.

Lane l of a 32x32 (16x16) instruction holds row or column l % 32 (l % 16) of its operands and
consecutive values of k; a result register holds one row of each group of lanes. Products are summed
in double precision and rounded once, which the matrix units of the hardware do not promise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gfx9.assembly import Instruction, Operand
from tests.gfx9.errors import UnknownInstruction
from tests.gfx9.floats import BF8, FP8
from tests.gfx9.lanes import LANE
from tests.gfx9.operands import check_modifiers, reader, write_register
from tests.gfx9.waves import Waves

Array = np.ndarray[Any, Any]
Run = Callable[[Waves], None]


def _bf16(bits: Array) -> Array:
    return (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _xf32(bits: Array) -> Array:
    """float32 without the lower 13 bits of its mantissa."""
    words = bits.view(np.uint32)
    rounded = words + np.uint32(0xFFF) + ((words >> np.uint32(13)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFFE000)).view(np.float32)


# The type of an operand: bytes of an element, and its values from uint8 rows.
TYPES: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "f32": (4, lambda b: b.view(np.float32)),
    "xf32": (4, _xf32),
    "f16": (2, lambda b: b.view(np.float16)),
    "bf16": (2, _bf16),
    "bf16_1k": (2, _bf16),
    "i8": (1, lambda b: b.view(np.int8)),
    "fp8": (1, FP8.decoded),
    "bf8": (1, BF8.decoded),
}


def _values(w: Waves, operand: Operand, kind: str) -> Array:
    """An operand as an array (waves, lanes, elements of a lane)."""
    words = [w.vectors[operand.kind][operand.first + k] for k in range(operand.count)]
    rows = np.ascontiguousarray(np.stack(words, axis=-1)).view(np.uint8)
    return TYPES[kind][1](rows).astype(np.float64)


def _as_matrix(values: Array, size: int) -> Array:
    """(waves, 64, elements) -> (waves, size, k): lane l holds row l % size."""
    waves, lanes, elements = values.shape
    parts = values.reshape(waves, lanes // size, size, elements)
    return parts.transpose(0, 2, 1, 3).reshape(waves, size, -1)


def _rows(size: int, number: int) -> Array:
    """The row of the result that a register holds in each lane."""
    return (
        number // 4 * 8 + LANE // size * 4 + number % 4 if size == 32 else LANE // 16 * 4 + number
    )


def mfma(i: Instruction) -> Run:
    check_modifiers(i, "")  # cbsz, abid, blgp and neg change the operands
    found = re.fullmatch(r"v_mfma_(f32|i32)_(32x32|16x16)x(\d+)_(\w+)", i.op)
    kinds = found.group(4) if found else ""
    pair = kinds.split("_") if re.fullmatch(r"[bf]p?[f8]*_[bf]p?[f8]*", kinds) else [kinds, kinds]
    if found is None or any(kind not in TYPES for kind in pair):
        raise UnknownInstruction(i.text)
    result, shape, depth, _ = found.groups()
    size = int(shape[:2])
    target, a, b, c = i.operands
    if a.count * 4 // TYPES[pair[0]][0] * (64 // size) != int(depth):
        raise UnknownInstruction(f"{i.text!r}: operands of another size")
    registers = [
        reader(c if c.kind in ("int", "float") else Operand(c.kind, c.first + k), result)
        for k in range(target.count)
    ]
    columns = LANE % size

    def run(w: Waves) -> None:
        left, right = (_values(w, x, kind) for x, kind in zip((a, b), pair, strict=True))
        product = _as_matrix(left, size) @ _as_matrix(right, size).transpose(0, 2, 1)
        sums = []
        for number, old in enumerate(registers):
            total = old(w) + product[:, _rows(size, number), columns]
            if result == "i32":
                sums.append(total.astype(np.int64).astype(np.uint32))
            else:
                sums.append(total.astype(np.float32).view(np.uint32))
        # Matrix instructions write every lane, whatever exec is.
        for number, bits in enumerate(sums):
            write_register(w, target, number, bits, np.True_)

    return run
