"""Memory that library calls share: inputs whose storage they access, views they return."""

from __future__ import annotations

from perfuse.graph.storage_ops import Treatment, storage_treatment
from perfuse.ir.program import BufferKind, LibraryCall, Opaque, View
from perfuse.schedule.plan import Plan

_VIEWING = frozenset({Treatment.LOWERED, Treatment.OWNED, Treatment.VIEW})


def storage_inputs(plan: Plan) -> set[str]:
    """Inputs that calls address by their place in storage, themselves or through views."""
    seen: set[str] = set()
    for step in reversed([s for s in plan.steps if isinstance(s, LibraryCall)]):
        treatment = storage_treatment(step.op)
        is_chained = treatment in _VIEWING and not seen.isdisjoint(step.makes())
        if treatment is Treatment.LOWERED or is_chained:
            seen |= {view.buffer for view in step.views()[:1]}
    buffers = plan.program.buffers
    return {name for name in seen if name in buffers and buffers[name].kind == BufferKind.INPUT}


def views_from_calls(plan: Plan) -> tuple[set[str], set[str]]:
    """Results of calls that share their argument's memory: an input's, and the program's own.

    The inputs and constants themselves are in the first set.
    """
    given = {*plan.program.inputs, *plan.program.constants}
    own: set[str] = set()
    for step in plan.steps:
        if not isinstance(step, LibraryCall) or step.returns_view or not step.args:
            continue
        source = step.args[0]
        if storage_treatment(step.op) in _VIEWING and isinstance(source, View | Opaque):
            name = source.buffer if isinstance(source, View) else source.name
            (given if name in given else own).update(step.makes())
    return given, own
