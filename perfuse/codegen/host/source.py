"""`HostSource`: a host program as plain data, which the runtime binds and the cache keeps."""

from __future__ import annotations

from dataclasses import dataclass

from perfuse.codegen.host.tables import GpuTables


@dataclass(frozen=True, slots=True)
class GuardRow:
    """A buffer's bytes in the arena, and the turns of the host program in which it owns them."""

    name: str
    offset: int
    num_bytes: int
    dtype: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ArenaWindow:
    """A tensor over the arena: built once per frame, used by every call."""

    offset: int  # bytes from the start of the arena
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostSource:
    """The text of the host program and the tables it expects."""

    text: str
    num_pointers: int
    num_sizes: int
    arena_bytes: int
    windows: tuple[ArenaWindow, ...]
    fixed_pointers: tuple[tuple[int, int], ...]  # place in P, byte offset in the arena
    constants: tuple[str, ...]
    num_inputs: int
    segments: tuple[str, ...]  # functions of the library that the text calls
    ops: tuple[str, ...]  # operators of torch.ops that it calls, and "py:..." ones it is given
    gpu: GpuTables | None = None  # what it launches, where it runs on a GPU
    guards: tuple[GuardRow, ...] = ()  # the arena's buffers, if the program guards its memory


def function_name(op: str) -> str:
    """The variable that holds an op: runtime/host_names.py fills it."""
    return "op_" + "".join(c if c.isalnum() else "_" for c in op)
