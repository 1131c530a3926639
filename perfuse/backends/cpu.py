"""The CPU: C++ kernels in one shared library, launched by a Python function."""

from __future__ import annotations

from perfuse.build.compiler import build_shared_library
from perfuse.cache.manifest import Entry
from perfuse.codegen.cpp.unit import CppSources
from perfuse.codegen.host.program import generate_host
from perfuse.codegen.host.source import HostSource
from perfuse.context import Context
from perfuse.schedule.plan import Plan


def build(sources: CppSources, context: Context) -> tuple[Entry, ...]:
    """The library; a plan with only library calls has none."""
    return (build_shared_library(sources.units, context),) if sources.units else ()


def host(plan: Plan, sources: CppSources, context: Context) -> HostSource:
    # Frames, and with them arenas, are kept between calls unless there is a budget.
    return generate_host(plan, sources, keeps_frames=context.settings.memory_budget is None)
