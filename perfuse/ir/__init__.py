"""The data that all later rooms share: dtypes, index algebra, scalar expressions, the Program.

Lowering builds a Program and scheduling reads it. Everything is immutable and interned, and
nothing here knows about ATen graphs, devices or generators.
"""

from __future__ import annotations

import importlib
from typing import Any

# Names that users of other compilers look for here; they are not part of this room.
_FACES = ("Buffer", "FixedLayout", "GraphLowering")


def __getattr__(name: str) -> Any:
    if name not in _FACES:
        raise AttributeError(f"module 'perfuse.ir' has no attribute {name!r}")
    return getattr(importlib.import_module("perfuse.autotune.faces"), name)
