"""While Dynamo captures, the interpreter keeps the memory of its frames.

CPython maps and unmaps 16 KiB whenever a call crosses the end of a chunk of frames. Dynamo recurses
deeply and makes millions of small calls: on the warm start of a 24-layer model that was 71,000
pairs of system calls, and with their page faults one part in fourteen of the first call. In
between, an allocator that keeps four such blocks is put in place through CPython's own interface
for that (`build/frame_chunks.cpp`). It is built after a capture was stored, for the processes that
load it.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from perfuse import config
from perfuse.build import compiler, load_library
from perfuse.build.compiler import LIBRARY, build_shared_library, library_key, open_store
from perfuse.context import CPU, Context
from perfuse.counters import Counters
from perfuse.errors import PerfuseError
from perfuse.torch_compat import on_compile

SOURCE = Path(compiler.__file__).parent / "frame_chunks.cpp"


class Keeper:
    """The allocator of one built library: put in place, and taken away again."""

    def __init__(self, data: bytes) -> None:
        handle = load_library(data)._handle
        self.library = ctypes.PyDLL(
            None, handle=handle
        )  # its functions are called with the GIL held
        self.library.release_chunks.restype = ctypes.c_size_t
        api = ctypes.pythonapi
        self.access = (api.PyObject_GetArenaAllocator, api.PyObject_SetArenaAllocator)

    def keep(self) -> bool:
        """Keep freed blocks from now on; whether that is so."""
        return bool(self.library.keep_chunks(*self.access))

    def release(self) -> int:
        """Back to what was there before; how many blocks were used again so far."""
        return int(self.library.release_chunks(*self.access))


def build_keeper(context: Context) -> None:
    """Have the library in the store for the next process, unless it cannot be had."""
    if not context.settings.keep_frame_chunks or not context.settings.cache.enabled:
        return
    try:
        build_shared_library([_unit()], _quiet(context))
    except (PerfuseError, OSError):
        context.counters.inc("frame_chunks.not_built")


def find_keeper(context: Context) -> Keeper | None:
    """The allocator in the store, if it is there and this interpreter can use it."""
    if not context.settings.keep_frame_chunks or not context.settings.cache.enabled:
        return None
    quiet = _quiet(context)
    try:
        entry = open_store(quiet).get(library_key([_unit()], quiet.target, quiet.settings))
        return None if entry is None else Keeper(entry.read_bytes(LIBRARY))
    except (PerfuseError, OSError, AttributeError):  # the last: not CPython's interface
        return None


@cache
def keep_frame_chunks() -> None:
    """From now on, keep them while something is captured; asked for again, do nothing."""
    found: list[Keeper] = []
    on_compile(partial(_keep, found), partial(_release, found))


def _keep(found: list[Keeper], _: Any) -> None:
    try:
        context = Context.on(CPU, config.snapshot())
    except PerfuseError:
        return  # wrong settings are told where something is compiled
    if not context.settings.keep_frame_chunks:
        return
    if not found:
        keeper = find_keeper(context)
        found.extend([] if keeper is None else [keeper])
    for keeper in found:
        keeper.keep()


def _release(found: list[Keeper], _: Any) -> None:
    for keeper in found:
        keeper.release()


def _unit() -> tuple[str, str]:
    return "frame_chunks", SOURCE.read_text()


def _quiet(context: Context) -> Context:
    """Kernels are counted, and this is none. Nor does it depend on the device of a graph."""
    return replace(Context.on(CPU, context.settings), counters=_uncounted())


@cache
def _uncounted() -> Counters:
    return Counters()
