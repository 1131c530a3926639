"""Shared libraries, validated before they are loaded.

Loading a truncated library does not fail: it kills the process when a page past the end is
touched. So the few headers that the loader relies on are checked against the bytes that are there.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable, Iterator

from perfuse.errors import LibraryDamaged

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SEGMENT = struct.Struct("<IIQQQQQQ")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
ELF64_LITTLE = b"\x7fELF\x02\x01"
SHARED_OBJECT, LOAD, DYNAMIC_SYMBOLS = 3, 1, 11
MACHINES = {"x86_64": 62, "aarch64": 183, "arm64": 183}


def check_library(data: bytes, exports: Iterable[str] = ()) -> None:
    """Raise LibraryDamaged unless these bytes are a complete library with these functions."""
    try:
        segments = list(_segments(data))
        missing = set(exports) - set(_exported(data)) if exports else set()
    except struct.error as error:
        raise LibraryDamaged(f"the library is truncated inside a table: {error}") from error
    if not segments:
        raise LibraryDamaged("the library has no segment to load")
    if missing:
        raise LibraryDamaged(f"the library has no function {', '.join(sorted(missing))}")


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each part of the file that is mapped begins and ends."""
    if not data.startswith(ELF64_LITTLE):
        raise LibraryDamaged(f"not a shared library: it starts with {data[:16]!r}")
    _, kind, machine, _, _, start, _, _, _, size, count, *_ = HEADER.unpack_from(data)
    wanted = MACHINES.get(platform.machine(), machine)
    if kind != SHARED_OBJECT or machine != wanted:
        raise LibraryDamaged(f"not a shared library for this machine ({kind=}, {machine=})")
    for number in range(count):
        what, _, offset, _, _, num_bytes, _, _ = SEGMENT.unpack_from(data, start + number * size)
        if what == LOAD:
            if offset + num_bytes > len(data):
                raise LibraryDamaged(
                    f"the library is truncated: {len(data)} of {offset + num_bytes} bytes"
                )
            yield offset, offset + num_bytes


def _exported(data: bytes) -> Iterator[str]:
    """The names of the functions that the library defines."""
    _, _, _, _, _, _, start, _, _, _, _, size, count, _ = HEADER.unpack_from(data)
    sections = [SECTION.unpack_from(data, start + number * size) for number in range(count)]
    for _, kind, _, _, offset, num_bytes, link, _, _, _ in sections:
        if kind == DYNAMIC_SYMBOLS and link < len(sections):
            names = sections[link][4]
            for at in range(offset, offset + num_bytes, SYMBOL.size):
                name, _, _, section, _, _ = SYMBOL.unpack_from(data, at)
                if section:
                    end = data.find(b"\0", names + name)
                    yield data[names + name : end].decode(errors="replace")
