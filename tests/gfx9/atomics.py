"""Atomic instructions: one lane after another, in order of waves and lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gfx9.assembly import Instruction
from tests.gfx9.memory_ops import (
    CACHE,
    Run,
    buffer_places,
    fill_registers,
    global_address,
    register_bytes,
)
from tests.gfx9.operands import check_modifiers
from tests.gfx9.waves import Waves

Array = np.ndarray[Any, Any]
Update = Callable[[Array, Array], Any]


def _bf16_sum(old: Array, new: Array) -> Array:
    """Sums of bfloat16 as bits: rounded to the nearest, ties to even."""
    wide = [(x.astype(np.uint32) << np.uint32(16)).view(np.float32) for x in (old, new)]
    bits = (wide[0] + wide[1]).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


# Suffix -> the type of an element, and what becomes of it.
UPDATES: dict[str, tuple[Any, Update]] = {
    "add_f32": (np.float32, np.add),
    "add_f64": (np.float64, np.add),
    "max_f64": (np.float64, np.fmax),
    "min_f64": (np.float64, np.fmin),
    "pk_add_f16": (np.float16, np.add),
    "pk_add_bf16": (np.uint16, _bf16_sum),
}
for _suffix, _unsigned, _signed in (("", np.uint32, np.int32), ("_x2", np.uint64, np.int64)):
    UPDATES |= {
        f"add{_suffix}": (_unsigned, np.add),
        f"sub{_suffix}": (_unsigned, np.subtract),
        f"and{_suffix}": (_unsigned, np.bitwise_and),
        f"or{_suffix}": (_unsigned, np.bitwise_or),
        f"xor{_suffix}": (_unsigned, np.bitwise_xor),
        f"umax{_suffix}": (_unsigned, np.maximum),
        f"umin{_suffix}": (_unsigned, np.minimum),
        f"smax{_suffix}": (_signed, np.maximum),
        f"smin{_suffix}": (_signed, np.minimum),
        f"swap{_suffix}": (_unsigned, lambda old, new: new),
        f"cmpswap{_suffix}": (_unsigned, lambda old, new: np.where(old == new[1], new[0], old)),
    }


def _size_of(name: str) -> int:
    """Bytes in memory."""
    return 8 if name.endswith(("_x2", "f64")) else 4


def atomic(i: Instruction) -> Run:
    """global_atomic_* and buffer_atomic_*; with sc0 the old value is returned."""
    name = i.op.partition("_atomic_")[2]
    dtype, update = UPDATES[name]
    size = _size_of(name)
    # A compare-and-swap is given the new value, then the one to compare with.
    given = 2 * size if name.startswith("cmpswap") else size
    returns = i.flag("sc0")
    if i.op.startswith("buffer"):
        places, source = buffer_places(i, size), i.operands[0]
        target = source
    else:
        check_modifiers(i, f"{CACHE} offset")
        operands = i.operands if returns else (None, *i.operands)
        target, address, source, base = operands
        at_of = global_address(address, base, i.number("offset"))
        places = lambda w: (np.broadcast_to(at_of(w), w.exec.shape), w.exec)  # noqa: E731

    def run(w: Waves) -> None:
        at, mask = places(w)
        if not mask.any():
            return
        data = register_bytes(w, source, given, mask).view(dtype)
        old = np.empty((len(data), size), np.uint8)
        for lane, (address, row) in enumerate(zip(at[mask], data, strict=True)):
            place = address.reshape(1)
            found = w.memory.load(place, size)
            old[lane] = found
            value = row if given == size else row.reshape(2, -1)
            made = np.asarray(update(found.view(dtype), value), dtype)
            w.memory.store(place, made.reshape(1, -1).view(np.uint8))
        if returns:
            fill_registers(w, target, 0, old, mask, "dword")

    return run


SPECIAL: dict[str, Callable[[Instruction], Run]] = {
    f"{kind}_atomic_{name}": atomic for kind in ("global", "buffer") for name in UPDATES
}
