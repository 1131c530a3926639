"""Times of single kernels, for the log: `benchmark_kernel`."""

from __future__ import annotations

from perfuse.autotune.program_request import ProgramRequest
from perfuse.autotune.race import CANNOT_RUN
from perfuse.autotune.run_alone import plan_of_one
from perfuse.autotune.tiles import is_measurable
from perfuse.context import Context
from perfuse.logs import channel
from perfuse.schedule.plan import Plan, with_tile
from perfuse.schedule.schedule import place
from perfuse.torch_compat.state import disable_dispatch_modes

LOG = channel("tuning")


def log_kernel_times(plan: Plan, context: Context) -> Plan:
    """The same plan, after each kernel of known sizes was run alone on random data."""
    has_device = context.target.gpu is None or context.device.type == "cuda"
    if not context.settings.benchmark_kernel or not has_device:
        return plan
    for kernel in plan.kernels:
        if not is_measurable(kernel, plan):
            continue
        alone = plan_of_one(kernel, plan)
        tile = plan.tiles.get(kernel.name)
        alone = place(alone if tile is None else with_tile(alone, tile), context)
        try:
            with disable_dispatch_modes():
                request = ProgramRequest.of(alone, context=context)
                taken_ms = request.benchmark()
        except CANNOT_RUN as error:
            LOG.info("kernel %s cannot be timed: %s", kernel.name, error)
            continue
        rate = kernel.num_bytes / (1e6 * taken_ms)
        LOG.info("kernel %s: %.1f us, %.1f GB/s", kernel.name, 1e3 * taken_ms, rate)
        context.counters.inc("autotune.kernels_timed")
    return plan
