"""`tune`: choices made by measurement, each a function from Plan to Plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perfuse.autotune.time_limit import limited
from perfuse.context import Context
from perfuse.deferred import deferred
from perfuse.ir.matmul import ATEN_GROUPED_MATMUL, GROUPED_MATMUL, GROUPED_OUTER
from perfuse.ir.program import Extern, Matmul
from perfuse.schedule.plan import Plan
from perfuse.selection import is_selecting

Tuner = Callable[[Plan, Context], Plan]


def tune(plan: Plan, context: Context) -> Plan:
    """The plan with every choice that was measured on this machine, within the time limit."""
    context = limited(context)
    for tuner in TUNERS:
        plan = tuner(plan, context)
    return plan


@dataclass(frozen=True, slots=True)
class ConditionalTuner:
    """A tuner for some plans; for others it is not even imported."""

    concerns: Callable[[Plan, Context], bool]
    tuner: Tuner

    def __call__(self, plan: Plan, context: Context) -> Plan:
        return self.tuner(plan, context) if self.concerns(plan, context) else plan


def _may_choose_matmuls(plan: Plan, context: Context) -> bool:
    """Whether there is a matmul to decide on, or a setting to check."""
    is_cpu_matmul = context.target.gpu is None and any(isinstance(s, Matmul) for s in plan.steps)
    return is_cpu_matmul or is_selecting(context.settings)


def _has_groups(plan: Plan, context: Context) -> bool:
    """Whether a library multiplies groups of rows on a CPU."""
    grouped = (GROUPED_MATMUL, GROUPED_OUTER, ATEN_GROUPED_MATMUL)
    calls = [step.op for step in plan.steps if isinstance(step, Extern)]
    return context.target.gpu is None and any(op in grouped for op in calls)


def _is_on_gpu(plan: Plan, context: Context) -> bool:
    return context.target.gpu is not None


def _selects(plan: Plan, context: Context) -> bool:
    return is_selecting(context.settings)


def _times_kernels(plan: Plan, context: Context) -> bool:
    return context.settings.benchmark_kernel


TUNERS: list[Tuner] = [
    ConditionalTuner(_may_choose_matmuls, deferred("perfuse.autotune.matmuls:tune_matmuls")),
    ConditionalTuner(_has_groups, deferred("perfuse.autotune.known_groups:with_known_groups")),
    ConditionalTuner(_is_on_gpu, deferred("perfuse.autotune.templates:tune_templates")),
    ConditionalTuner(_is_on_gpu, deferred("perfuse.autotune.tune_tiles:tune_tiles")),
    ConditionalTuner(_selects, deferred("perfuse.autotune.race_selected:require_selected")),
    ConditionalTuner(_times_kernels, deferred("perfuse.autotune.kernel_times:log_kernel_times")),
]
