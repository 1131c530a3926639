"""A GPU program, just built or from the cache, made callable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfuse.build import LIBRARY, UNIT_LIBRARY
from perfuse.build.bundle import read_bundle
from perfuse.cache.manifest import Entry
from perfuse.codegen.host.source import HostSource
from perfuse.codegen.triton.sources import unit_name
from perfuse.context import Context
from perfuse.runtime.bind_gpu import bind_gpu, launcher_of
from perfuse.runtime.host_library import HostLibrary
from perfuse.runtime.host_names import Call


def load(
    host: HostSource, built: Sequence[Entry], constants: Mapping[str, Any], context: Context
) -> Call:
    bundle, *others = built
    libraries = [entry.read_bytes(LIBRARY) for entry in others if LIBRARY in entry.contents]
    found = [entry.read_bytes(UNIT_LIBRARY) for entry in others if UNIT_LIBRARY in entry.contents]
    units = {unit_name(n): HostLibrary(unit_name(n), data) for n, data in enumerate(found)}
    library = libraries[0] if libraries else None
    launcher = launcher_of(read_bundle(bundle.read_bytes), context, library, units)
    return bind_gpu(host, launcher, constants)
