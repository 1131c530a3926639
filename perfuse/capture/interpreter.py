"""Versions of Python in which captures are not safe."""

import sys
from collections.abc import Sequence

from perfuse.errors import UnsupportedPython

# Dynamo's guards miss that `train()` or `eval()` was called: the wrong graph runs, silently.
UNSAFE = frozenset({(3, 13, 0)})


def check_interpreter(version: Sequence[int | str] = sys.version_info) -> None:
    """Raise on a Python in which graphs run although their guards fail, with any backend."""
    if tuple(version[:3]) in UNSAFE:
        name = ".".join(map(str, version[:3]))
        raise UnsupportedPython(
            f"Python {name} cannot be used with torch.compile: a compiled module keeps running its "
            "training graph after eval(), and vice versa",
            hint=f"upgrade to a later Python {version[0]}.{version[1]}.",
        )
