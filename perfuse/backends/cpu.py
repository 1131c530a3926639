"""The CPU: C++ kernels in one shared library, launched by a Python function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfuse.backends.backend import Backend
from perfuse.build import LIBRARY, build_shared_library
from perfuse.cache.manifest import Entry
from perfuse.codegen.cpp.unit import CppSources, generate_sources
from perfuse.codegen.host.program import HostSource, generate_host
from perfuse.context import Context
from perfuse.runtime.bind_cpu import bind
from perfuse.runtime.host_names import Call
from perfuse.schedule.plan import Plan


def build(sources: CppSources, context: Context) -> tuple[Entry, ...]:
    """The library; a plan of library calls alone has none."""
    return (build_shared_library(sources.units, context),) if sources.units else ()


def host(plan: Plan, sources: CppSources, context: Context) -> HostSource:
    # Frames, and with them arenas, are kept between calls unless there is a budget.
    return generate_host(plan, sources, keeps_frames=context.settings.memory_budget is None)


def load(
    host: HostSource, built: Sequence[Entry], constants: Mapping[str, Any], context: Context
) -> Call:
    library = built[0].read_bytes(LIBRARY) if built else None
    return bind(host, library, constants, context.settings)


CPU_BACKEND = Backend("cpu", lambda target: target.gpu is None, generate_sources, build, host, load)
