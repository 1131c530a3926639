"""`deferred`: a function named by its module, which is imported when the function is first called.

Rows for one kind of device or one mode name their functions this way: a process imports only what
its programs use. The names are checked like imports (`tests/unit/test_layers.py`).
"""

from __future__ import annotations

import importlib
from typing import Any


def deferred(place: str) -> Any:
    """The function at "package.module:name", spelled as entry points are."""
    module, _, name = place.partition(":")

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call
