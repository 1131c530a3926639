"""Placed plans that tuners compile and run alone, apart from the program they are part of."""

from typing import Any

from perfuse.backends import backend_of
from perfuse.context import Context
from perfuse.runtime.host_names import Call
from perfuse.schedule.plan import Plan


def built(plan: Plan, context: Context) -> tuple[Any, Any]:
    """The sources of a plan and what was built of them, from the store where it is there."""
    backend = backend_of(context.target)
    sources = backend.generate(plan, context)
    return sources, backend.build(sources, context)


def loaded(plan: Plan, context: Context) -> Call:
    """A callable that runs a plan."""
    backend, (sources, entries) = backend_of(context.target), built(plan, context)
    return backend.load(backend.host(plan, sources, context), entries, {}, context)
