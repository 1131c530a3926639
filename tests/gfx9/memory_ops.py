"""Memory instructions: global and buffer accesses, local memory, atomics, and moves between lanes.

An access runs over the active lanes of all waves in step; lanes that write to the same place
do so in order of their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gfx9.assembly import Instruction, Operand
from tests.gfx9.errors import UnknownInstruction
from tests.gfx9.lanes import swizzle_lanes
from tests.gfx9.operands import check_modifiers, raw_reader, reader, write_register
from tests.gfx9.waves import LANES, Waves

Array = np.ndarray[Any, Any]
Run = Callable[[Waves], None]
Addresses = Callable[[Waves], Array]

CACHE = "sc0 sc1 nt"
# The type of an access narrower than a register: bytes, and how it fills the register.
NARROW = {
    "ubyte": (1, np.uint8), "sbyte": (1, np.int8), "ushort": (2, np.uint16),
    "sshort": (2, np.int16), "byte": (1, np.uint8), "short": (2, np.uint16),
    "u8": (1, np.uint8), "i8": (1, np.int8), "u16": (2, np.uint16), "i16": (2, np.int16),
    "b8": (1, np.uint8), "b16": (2, np.uint16),
}  # fmt: skip


def _size_of(kind: str) -> int:
    """The bytes that a name such as dwordx4, b64 or ushort stands for."""
    if kind in NARROW:
        return NARROW[kind][0]
    found = re.fullmatch(r"dword(?:x(\d))?", kind)
    if found:
        return 4 * int(found.group(1) or 1)
    found = re.fullmatch(r"b(\d+)", kind)
    if found:
        return int(found.group(1)) // 8
    raise UnknownInstruction(f"no access of type {kind!r}")


def fill_registers(
    w: Waves, target: Operand, first: int, data: Array, mask: Array, kind: str
) -> None:
    """Bytes of the lanes of a mask -> registers."""
    if kind in NARROW:
        words = data.view(NARROW[kind][1]).astype(np.int64).astype(np.uint32)
    else:
        words = np.ascontiguousarray(data).view(np.uint32)
    for k in range(words.shape[1]):
        w.vectors[target.kind][target.first + first + k][mask] = words[:, k]


def _fill_half(w: Waves, target: Operand, data: Array, mask: Array, is_high: bool) -> None:
    """16 bits of a register; the other half is kept."""
    old = w.vectors[target.kind][target.first][mask]
    half = data.astype(np.uint32)
    made = (old & np.uint32(0xFFFF)) | half << np.uint32(16) if is_high else half
    w.vectors[target.kind][target.first][mask] = made


def register_bytes(w: Waves, source: Operand, size: int, mask: Array, shift: int = 0) -> Array:
    """Registers of the lanes of a mask -> bytes."""
    count = max(1, size // 4)
    words = [
        np.broadcast_to(raw_reader(_part(source, k), 32)(w), mask.shape)[mask] for k in range(count)
    ]
    rows = np.stack(words, axis=1) >> np.uint32(shift)
    return np.ascontiguousarray(rows).view(np.uint8)[:, :size]


def _part(operand: Operand, number: int) -> Operand:
    return Operand(operand.kind, operand.first + number, 1, operand.text)


def global_address(address: Operand, base: Operand, offset: int) -> Addresses:
    """v[0:1], off; or v0, s[2:3]: a 32-bit offset from a scalar address."""
    wide = np.uint64(offset & (1 << 64) - 1)
    if base.kind == "s":
        scalar, by = raw_reader(base, 64), raw_reader(address, 32)
        return lambda w: scalar(w) + by(w).astype(np.uint64) + wide
    whole = raw_reader(address, 64)
    return lambda w: whole(w) + wide


def global_load(i: Instruction) -> Run:
    check_modifiers(i, f"{CACHE} offset")
    kind = i.op.removeprefix("global_load_")
    half = re.fullmatch(r"(\w+)_d16(_hi)?", kind)
    kind = half.group(1) if half else kind
    size = _size_of("ushort" if kind == "short" else kind)
    target, address, base = i.operands
    addresses = global_address(address, base, i.number("offset"))

    def run(w: Waves) -> None:
        if not w.exec.any():
            return
        at = np.broadcast_to(addresses(w), w.exec.shape)[w.exec]
        data = w.memory.load(at, size)
        if half:
            values = data.view(NARROW[kind][1])[:, 0].astype(np.int64).astype(np.uint16)
            _fill_half(w, target, values, w.exec, half.group(2) is not None)
        else:
            fill_registers(w, target, 0, data, w.exec, kind)

    return run


def global_store(i: Instruction) -> Run:
    check_modifiers(i, f"{CACHE} offset")
    kind = i.op.removeprefix("global_store_")
    shift = 16 if kind.endswith("_d16_hi") else 0
    size = _size_of(kind.removesuffix("_d16_hi"))
    address, source, base = i.operands
    addresses = global_address(address, base, i.number("offset"))

    def run(w: Waves) -> None:
        if w.exec.any():
            at = np.broadcast_to(addresses(w), w.exec.shape)[w.exec]
            w.memory.store(at, register_bytes(w, source, size, w.exec, shift))

    return run


def buffer_places(i: Instruction, size: int) -> Callable[[Waves], tuple[Array, Array]]:
    """Addresses of a buffer access, and the active lanes inside its range."""
    check_modifiers(i, f"{CACHE} offen offset")
    _, by, resource, extra = i.operands
    base = raw_reader(Operand("s", resource.first, 2), 64)
    length = raw_reader(Operand("s", resource.first + 2), 32)
    scalar, constant = raw_reader(extra, 32), np.uint64(i.number("offset"))
    # Without an offset of its own for each lane, the operand is `off`.
    offset = raw_reader(by, 32) if i.flag("offen") else None

    def places(w: Waves) -> tuple[Array, Array]:
        inside = constant + (np.uint64(0) if offset is None else offset(w).astype(np.uint64))
        is_inside = inside + scalar(w).astype(np.uint64) + np.uint64(size) <= length(w)
        at = (base(w) & np.uint64((1 << 48) - 1)) + inside + scalar(w).astype(np.uint64)
        return np.broadcast_to(at, w.exec.shape), w.exec & is_inside

    return places


def buffer_load(i: Instruction) -> Run:
    """Load from a buffer; outside its range there are zeros."""
    kind = i.op.removeprefix("buffer_load_")
    size, target = _size_of(kind), i.operands[0]
    places = buffer_places(i, size)

    def run(w: Waves) -> None:
        at, mask = places(w)
        zeros = np.zeros((int(w.exec.sum()), size), np.uint8)
        fill_registers(w, target, 0, zeros, w.exec, kind)
        if mask.any():
            fill_registers(w, target, 0, w.memory.load(at[mask], size), mask, kind)

    return run


def buffer_store(i: Instruction) -> Run:
    kind = i.op.removeprefix("buffer_store_")
    size, source = _size_of(kind), i.operands[0]
    places = buffer_places(i, size)

    def run(w: Waves) -> None:
        at, mask = places(w)
        if mask.any():
            w.memory.store(at[mask], register_bytes(w, source, size, mask))

    return run


def _local_address(operand: Operand, offset: int) -> Addresses:
    read = raw_reader(operand, 32)
    return lambda w: np.broadcast_to(read(w) + np.uint32(offset), w.exec.shape)


def _groups(w: Waves, mask: Array) -> Array:
    found: Array = np.broadcast_to(w.group[:, None], mask.shape)[mask]
    return found


def _local_offsets(i: Instruction, size: int) -> list[int]:
    """One offset in bytes, or two in elements: ds_read2, ds_write2st64."""
    if re.match(r"ds_(read|write)2", i.op) is None:
        return [i.number("offset")]
    scale = size * (64 if "st64" in i.op else 1)
    return [scale * i.number("offset0"), scale * i.number("offset1")]


def local_load(i: Instruction) -> Run:
    check_modifiers(i, "offset offset0 offset1")
    kind = i.op.split("_")[2]
    half = re.search(r"_d16(_hi)?$", i.op)
    size, (target, address) = _size_of(kind), i.operands
    places = [_local_address(address, offset) for offset in _local_offsets(i, size)]

    def run(w: Waves) -> None:
        if not w.exec.any():
            return
        groups = _groups(w, w.exec)
        # All addresses are read before the first register is written: it may hold them.
        parts = [w.local.load(groups, place(w)[w.exec], size) for place in places]
        for number, data in enumerate(parts):
            if half:
                values = data.view(NARROW[kind][1])[:, 0].astype(np.int64).astype(np.uint16)
                _fill_half(w, target, values, w.exec, half.group(1) is not None)
            else:
                fill_registers(w, target, number * max(1, size // 4), data, w.exec, kind)

    return run


def local_store(i: Instruction) -> Run:
    check_modifiers(i, "offset offset0 offset1")
    kind = i.op.split("_")[2]
    shift = 16 if i.op.endswith("_d16_hi") else 0
    size, (address, *sources) = _size_of(kind), i.operands
    places = [_local_address(address, offset) for offset in _local_offsets(i, size)]

    def run(w: Waves) -> None:
        if not w.exec.any():
            return
        groups = _groups(w, w.exec)
        for place, source in zip(places, sources, strict=True):
            w.local.store(groups, place(w)[w.exec], register_bytes(w, source, size, w.exec, shift))

    return run


def swizzle(i: Instruction) -> Run:
    check_modifiers(i, "offset")
    target, source = i.operands
    lanes, read = swizzle_lanes(i.modifiers.get("offset", "0")), reader(source, "u32")

    def run(w: Waves) -> None:
        bits = np.where(w.exec, read(w), np.uint32(0))[:, lanes]
        write_register(w, target, 0, bits, w.exec)

    return run


def permute(i: Instruction) -> Run:
    """ds_bpermute_b32 reads the lane that an address names, ds_permute_b32 writes it."""
    check_modifiers(i, "offset")
    target, address, source = i.operands
    place, read = reader(address, "u32"), reader(source, "u32")
    offset, is_pull = np.uint32(i.number("offset")), i.op == "ds_bpermute_b32"

    def run(w: Waves) -> None:
        lane = np.broadcast_to((place(w) + offset) // 4 % LANES, w.exec.shape).astype(np.int64)
        bits = np.where(w.exec, read(w), np.uint32(0))
        if is_pull:
            made = np.take_along_axis(bits, lane, axis=1)
        else:
            made = np.zeros_like(bits)
            waves, lanes = np.nonzero(w.exec)
            made[waves, lane[waves, lanes]] = bits[waves, lanes]
        write_register(w, target, 0, made, w.exec)

    return run


SPECIAL: dict[str, Callable[[Instruction], Run]] = {
    **{
        f"global_load_{kind}": global_load
        for kind in (
            *("ubyte", "sbyte", "ushort", "sshort", "dword", "dwordx2", "dwordx3", "dwordx4"),
            *(f"{k}_d16{h}" for k in ("ubyte", "sbyte", "short") for h in ("", "_hi")),
        )
    },
    **{
        f"global_store_{kind}": global_store
        for kind in (
            *("byte", "short", "dword", "dwordx2", "dwordx3", "dwordx4"),
            *("byte_d16_hi", "short_d16_hi"),
        )
    },
    **{
        f"buffer_load_{kind}": buffer_load
        for kind in ("ubyte", "sbyte", "ushort", "sshort", "dword", "dwordx2", "dwordx3", "dwordx4")
    },
    **{
        f"buffer_store_{kind}": buffer_store
        for kind in ("byte", "short", "dword", "dwordx2", "dwordx3", "dwordx4")
    },
    **{
        f"ds_read_{kind}": local_load
        for kind in (
            *("u8", "i8", "u16", "i16", "b32", "b64", "b96", "b128"),
            *(f"{k}_d16{h}" for k in ("u8", "i8", "u16") for h in ("", "_hi")),
        )
    },
    **{
        f"ds_write_{kind}": local_store
        for kind in ("b8", "b16", "b32", "b64", "b96", "b128", "b8_d16_hi", "b16_d16_hi")
    },
    **{f"ds_read2{s}_b{n}": local_load for s in ("", "st64") for n in (32, 64)},
    **{f"ds_write2{s}_b{n}": local_store for s in ("", "st64") for n in (32, 64)},
    "ds_swizzle_b32": swizzle,
    "ds_bpermute_b32": permute,
    "ds_permute_b32": permute,
}
