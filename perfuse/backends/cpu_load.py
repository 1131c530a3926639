"""A CPU program, just built or from the cache, made callable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfuse.build import LIBRARY
from perfuse.cache.manifest import Entry
from perfuse.codegen.host.source import HostSource
from perfuse.context import Context
from perfuse.runtime.bind_cpu import bind
from perfuse.runtime.host_names import Call


def load(
    host: HostSource, built: Sequence[Entry], constants: Mapping[str, Any], context: Context
) -> Call:
    library = built[0].read_bytes(LIBRARY) if built else None
    return bind(host, library, constants, context.settings)
