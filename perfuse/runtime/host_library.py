"""Host calls: functions of built libraries that launch kernels of their own on a stream."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from perfuse.build.loader import load_library
from perfuse.codegen.host.tables import HostCallRow
from perfuse.codegen.triton.sources import RUN, WORKSPACE
from perfuse.errors import PerfuseError
from perfuse.runtime.frame import GpuFrame


class HostLibrary:
    """The host call of one unit: its address, and the memory that it needs besides."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        library = load_library(data)
        self._workspace = getattr(library, WORKSPACE)
        self._workspace.restype = ctypes.c_int64
        self._run: Any = getattr(library, RUN)
        self.address = ctypes.cast(self._run, ctypes.c_void_p).value or 0

    def workspace_bytes(self, row: HostCallRow) -> int:
        """The bytes of workspace for a row; raises PerfuseError if its sizes are not supported."""
        found = int(self._workspace(_numbers(row), _factors(row)))
        if found < 0:
            raise PerfuseError(f"the host call {self.name} does not support {row.sizes}")
        return found

    def run(self, frame: GpuFrame, row: HostCallRow) -> None:
        """Call it on memory of the CPU, without a stream."""
        workspace = ctypes.create_string_buffer(self.workspace_bytes(row) or 1)
        places = zip(row.pointers, row.offsets, strict=True)
        addresses = [frame.pointers[place] + offset for place, offset in places]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        code = self._run(pointers, _numbers(row), _factors(row), workspace, None)
        if code:
            raise RuntimeError(f"perfuse: the host call {self.name} failed (code {code})")


NO_UNITS: Mapping[str, HostLibrary] = MappingProxyType({})


def _numbers(row: HostCallRow) -> Any:
    return (ctypes.c_int64 * len(row.sizes))(*row.sizes)


def _factors(row: HostCallRow) -> Any:
    return (ctypes.c_double * len(row.factors))(*row.factors)


class CallArguments:
    """The tables of one host call as `launcher.cpp` reads them, kept alive with their frame."""

    def __init__(self, pointers: int, row: HostCallRow, workspace: Any) -> None:
        self.workspace = workspace
        self.addresses = array("Q", [pointers + 8 * place for place in row.pointers])
        self.offsets = array("q", row.offsets)
        self.sizes = array("q", row.sizes)
        self.factors = array("d", row.factors)

    def words(self, function: int) -> tuple[int, ...]:
        """A Record whose number of threads is 0: a host call."""
        tables = (self.sizes, self.addresses, self.offsets, self.factors)
        sizes, addresses, offsets, factors = (table.buffer_info()[0] for table in tables)
        workspace = 0 if self.workspace is None else self.workspace.data_ptr()
        passed = (sizes, addresses, offsets, factors, workspace)
        return (function, 0, len(self.addresses), *passed, 0, 0)
