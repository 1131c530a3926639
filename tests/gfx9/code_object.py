"""The kernel descriptor in a code object (ELF), to check that text and machine code are a pair."""

from __future__ import annotations

import struct
from dataclasses import dataclass

SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, ...
SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
SYMBOL_TABLES = (2, 11)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The sizes that a kernel descriptor starts with, in bytes."""

    group_segment: int
    private_segment: int
    kernarg: int


def descriptor_of(code: bytes, symbol: str) -> Descriptor:
    """The descriptor of a kernel, which the symbol `<kernel>.kd` points to."""
    (offset,) = struct.unpack_from("<Q", code, 40)
    size, count, _ = struct.unpack_from("<HHH", code, 58)
    sections = [SECTION.unpack_from(code, offset + k * size) for k in range(count)]
    for section in sections:
        if section[1] not in SYMBOL_TABLES:
            continue
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], SYMBOL.size):
            name, _, _, owner, value, _ = SYMBOL.unpack_from(code, at)
            if code[names + name :].partition(b"\0")[0] == f"{symbol}.kd".encode():
                home = sections[owner]
                return Descriptor(*struct.unpack_from("<III", code, home[4] + value - home[3]))
    raise LookupError(f"the code object has no kernel {symbol}")
