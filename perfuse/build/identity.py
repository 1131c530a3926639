"""What compiled code depends on besides its graph: as text, a part of every key."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch

from perfuse.context import Context
from perfuse.version import VERSION

PACKAGE = Path(__file__).parent.parent
KERNEL_COMPILER = ("triton_compile.py",)


@functools.cache
def code_digest() -> str:
    """The hash of Perfuse's own code: who changes it must not be served what the old one made."""
    return _digest([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.h"), *PACKAGE.rglob("*.cpp")])


@functools.cache
def kernel_compiler_digest() -> str:
    """The hash of what turns the text of a Triton kernel into machine code."""
    return _digest(PACKAGE / "build" / name for name in KERNEL_COMPILER)


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE)} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def identity(context: Context) -> str:
    """Versions, target and settings under which a graph is compiled."""
    versions = (VERSION, torch.__version__, code_digest())
    return repr((versions, context.target, context.settings.cache_key()))
