"""Times of single kernels, for the log: `benchmark_kernel`."""

from __future__ import annotations

from typing import Any

from perfuse.autotune.program_request import ProgramRequest
from perfuse.autotune.race import CANNOT_RUN
from perfuse.autotune.request import Operand
from perfuse.autotune.tiles import is_measurable, plan_of_one
from perfuse.context import Context
from perfuse.ir.dtype import to_torch
from perfuse.ir.program import Program
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
        if not is_measurable(kernel, plan.program):
            continue
        alone = plan_of_one(kernel, plan.program)
        tile = plan.tiles.get(kernel.name)
        alone = place(alone if tile is None else with_tile(alone, tile), context)
        try:
            with disable_dispatch_modes():
                request = ProgramRequest.of(alone, operands_of(alone.program, context), context)
                taken_ms = request.benchmark()
        except CANNOT_RUN as error:
            LOG.info("kernel %s cannot be timed: %s", kernel.name, error)
            continue
        rate = kernel.num_bytes / (1e6 * taken_ms)
        LOG.info("kernel %s: %.1f us, %.1f GB/s", kernel.name, 1e3 * taken_ms, rate)
        context.counters.inc("autotune.kernels_timed")
    return plan


def operands_of(program: Program, context: Context) -> list[Operand]:
    """Random inputs of a program whose sizes are known."""
    made = []
    for number, name in enumerate(program.inputs):
        buffer = program.buffers[name]
        shape: Any = buffer.shape
        strides: Any = buffer.strides
        dtype, device = to_torch(buffer.dtype), str(context.device)
        made.append(Operand(tuple(shape), tuple(strides), dtype, device, seed=number))
    return made
