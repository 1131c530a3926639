"""Inputs whose storage a call looks at: a copy elsewhere would not do for them."""

from __future__ import annotations

from perfuse.graph.storage_ops import Treatment, storage_treatment
from perfuse.ir.program import Extern
from perfuse.schedule.plan import Plan

_VIEWING = frozenset({Treatment.LOWERED, Treatment.OWNED, Treatment.VIEW})


def storage_inputs(plan: Plan) -> set[str]:
    """Inputs that calls address by their place in storage, themselves or through views."""
    seen: set[str] = set()
    for step in reversed([s for s in plan.steps if isinstance(s, Extern)]):
        treatment = storage_treatment(step.op)
        is_chained = treatment in _VIEWING and not seen.isdisjoint(step.makes())
        if treatment is Treatment.LOWERED or is_chained:
            seen |= {view.buffer for view in step.views()[:1]}
    buffers = plan.program.buffers
    return {name for name in seen if name in buffers and buffers[name].role == "input"}
