"""Copies that a pipelined loop makes ahead keep what their load said of caches.

Triton turns a load in such a loop into asynchronous copies to shared memory, and what the load said
(`eviction_policy='evict_first'`) is lost on the way to PTX. Every copy stands below the line of the
source that it came from, so what is lost can be put back.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MARK = "eviction_policy='evict_first'"
_LINE = re.compile(r"\s*\.loc\s+\d+\s+(\d+)\s")
_COPY = re.compile(r"(\s*)cp\.async\.(ca|cg)\.shared\.global (\[.*\], \[.*\], .*);")
_POLICY = "%streamed"
_MADE = (
    f"\t.reg .b64 \t{_POLICY};",
    f"\tcreatepolicy.fractional.L2::evict_first.b64 \t{_POLICY}, 1.0;",
)


def hinted(ptx: str, line_of: Callable[[int], str]) -> str:
    """The PTX with the hint in every copy whose line of the source has the mark."""
    lines = ptx.split("\n")
    source, found = "", 0
    for number, line in enumerate(lines):
        if (at := _LINE.match(line)) is not None:
            source = line_of(int(at.group(1)))
        elif MARK in source and (copy := _COPY.fullmatch(line)) is not None:
            indent, level, operands = copy.groups()
            instruction = f"cp.async.{level}.shared.global.L2::cache_hint"
            lines[number] = f"{indent}{instruction} {operands}, {_POLICY};"
            found += 1
    if not found:
        return ptx
    start = next(n for n, line in enumerate(lines) if line.startswith("// %bb.0:"))
    return "\n".join([*lines[: start + 1], *_MADE, *lines[start + 1 :]])
