"""Keys of the store: one function makes them all, and a table lists the kinds of entries.

A key is the hash of everything that decides what its entry holds. Because it covers the version of
the entry's format, an entry of another format is never found, and so never misread.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from perfuse.cache.lock_file import lock_digest
from perfuse.cache.manifest import FORMAT
from perfuse.context import Context
from perfuse.decision import Question
from perfuse.version import VERSION

PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of entry. Bump `version` whenever the format of its files changes."""

    name: str  # the first word of its keys
    version: int
    holds: str
    code: tuple[str, ...] = ()  # files of Perfuse (`*` spans folders) that decide what it holds
    is_decision: bool = False  # then an entry of another version of Perfuse is valid too


ALL_CODE = ("*.py", "*.h", "*.cpp")

LIBRARY = Kind(
    "library",
    1,
    "a shared library and the C++ sources it was built from",
    ("codegen/cpp/*.h", "build/compiler.py"),
)
KERNEL = Kind(
    "kernel", 1, "machine code and assembly of one Triton kernel", ("build/triton_compile.py",)
)
CK = Kind(
    "ck",
    1,
    "a library of Composable Kernel with its source, or why it does not compile",
    ("build/ck.py", "build/compiler.py"),
)
BUNDLE = Kind("gpu", 1, "machine code of all kernels of a GPU program")
MATMUL = Kind(
    "matmul",
    2,
    "which library call computes a matmul fastest, as measured",
    is_decision=True,
)
CONTRACTION = Kind(
    "contraction",
    1,
    "which C++ template or library call computes a matmul fastest",
    is_decision=True,
)
TILE = Kind("tile", 3, "which tile of a GPU kernel is fastest, as measured", is_decision=True)
TEMPLATE = Kind(
    "template",
    1,
    "which template or library call computes a contraction fastest, as measured",
    is_decision=True,
)
QUARANTINE = Kind("quarantine", 1, "a candidate that must not be run, with the reason", ALL_CODE)
GRAPH = Kind("graph", 2, "the host program and the constants of an ATen graph", ALL_CODE)
CAPTURE = Kind("capture", 1, "the graphs of a Dynamo graph, and how they are called", ALL_CODE)

KINDS = (
    *(LIBRARY, KERNEL, CK, BUNDLE, MATMUL, CONTRACTION, TILE, TEMPLATE, QUARANTINE),
    *(GRAPH, CAPTURE),
)
DECISIONS = {kind.name: kind for kind in KINDS if kind.is_decision}


def key_of(kind: Kind, *parts: object) -> str:
    """The key of an entry of this kind that these parts decide.

    Bytes and text count as they are, other parts by their `repr`, which must be the same in every
    process.
    """
    release = "" if kind.is_decision else VERSION
    own = (kind.name, kind.version, FORMAT, release, code_digest(kind.code))
    digest = hashlib.sha256()
    for part in (*own, *parts):
        data = part if isinstance(part, bytes) else _text(part).encode()
        digest.update(f"{type(part).__name__} {len(data)}\n".encode() + data)
    return f"{kind.name}-{digest.hexdigest()}"


def _text(part: object) -> str:
    return part if isinstance(part, str) else repr(part)


@functools.cache
def code_digest(patterns: tuple[str, ...]) -> str:
    """The hash of those of Perfuse's own files that match: an edit has to make old entries miss."""
    digest = hashlib.sha256()
    for name in own_files(patterns):
        with open(f"{PACKAGE}/{name}", "rb") as file:
            data = file.read()
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def own_files(patterns: Iterable[str]) -> list[str]:
    """The paths in the package of those of Perfuse's own files that match, sorted.

    Every process lists them for its first key, and `Path.glob` takes several times as long.
    """
    matches = re.compile("|".join(map(fnmatch.translate, patterns)) or "(?!)").match
    return sorted(
        name
        for folder, _, names in os.walk(PACKAGE)
        for name in (os.path.join(folder, each)[len(str(PACKAGE)) + 1 :] for each in names)
        if matches(name)
    )


def decision_key(question: Question) -> str:
    """The key of a decision: the problem, its candidates, the kind of device and versions."""
    return key_of(DECISIONS[question.kind], question)


def identity(context: Context) -> tuple[object, ...]:
    """The conditions of a compile: PyTorch's version, the target, settings and pinned choices."""
    pinned = lock_digest(context.settings.lock_file)
    return torch.__version__, context.target, context.settings.cache_key(), pinned
