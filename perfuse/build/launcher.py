"""The C++ library that passes launches to a GPU's driver."""

from __future__ import annotations

from pathlib import Path

from perfuse.build.compiler import build_shared_library
from perfuse.cache.manifest import Entry
from perfuse.context import Context

LAUNCHER = Path(__file__).with_name("launcher.cpp")


def build_launcher(context: Context) -> Entry | None:
    """Its entry in the store; None if there is no compiler to build it with."""
    if not context.target.compiler:
        return None
    return build_shared_library([("launcher", LAUNCHER.read_text())], context)
