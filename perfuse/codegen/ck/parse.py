"""Instances of an installed Composable Kernel: the lines of its sources that name them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from perfuse.codegen.ck.instance import Instance, expanded, instance_of

# The class that CK's lists name, plain and batched, and the folder below the instances.
PLAIN, BATCHED = "DeviceGemm_Xdl_CShuffleV3", "DeviceBatchedGemmMultiD_Xdl_CShuffle_V3"
FOLDERS = {PLAIN: "gemm_universal", BATCHED: "gemm_universal_batched"}
INSTANCES = "library/src/tensor_operation_instance/gpu"
# Positions of the D tensors' layouts and types, which lists of batched instances have.
_D_POSITIONS = (2, 6)


@dataclass(frozen=True, slots=True)
class Listed:
    """The instances of some sources, and the lines that are written in another way."""

    instances: tuple[Instance, ...]
    unread: tuple[str, ...] = ()


def listed(sources: Iterable[str], marker: str) -> Listed:
    """The distinct instances that sources name, sorted: the order of files does not matter."""
    found: dict[str, Instance] = {}
    unread: list[str] = []
    for line in (line for text in sources for line in text.splitlines()):
        arguments = _arguments(line, marker)
        if arguments is None:
            continue
        try:
            found |= {each.text: each for each in expanded(instance_of(arguments))}
        except ValueError:
            unread.append(arguments)
    ordered = tuple(found[text] for text in sorted(found))
    return Listed(ordered, tuple(sorted(set(unread))))


def _arguments(line: str, marker: str) -> str | None:
    """The template arguments of a line that names an instance; None for comments and others."""
    matched = re.match(rf"\s*{marker}\s*<(.*)>", line)
    if matched is None:
        return None
    text = " ".join(matched[1].split())
    if marker == BATCHED:
        cells = re.split(r",(?![^<]*>)", text)
        cells = [cell for place, cell in enumerate(cells) if place not in _D_POSITIONS]
        text = ",".join(cells)
    return text
