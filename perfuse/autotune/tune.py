"""`tune`: choices made by measurement, each a function from Plan to Plan."""

from __future__ import annotations

from collections.abc import Callable

import torch

from perfuse.autotune.contractions import tune_contractions
from perfuse.autotune.matmuls import tune_matmuls
from perfuse.autotune.race import Run
from perfuse.autotune.tiles import Device, measured_tiles
from perfuse.backends import backend_of
from perfuse.cache.manifest import Entry
from perfuse.codegen.triton.sources import TritonSources
from perfuse.context import Context
from perfuse.runtime.measure import event_timer, random_inputs
from perfuse.schedule.plan import Plan, with_tile
from perfuse.schedule.tile import Tile
from perfuse.torch_compat.state import disable_dispatch_modes

Tuner = Callable[[Plan, Context], Plan]


def tune(plan: Plan, context: Context) -> Plan:
    """The plan with every choice that was measured on this machine."""
    for tuner in TUNERS:
        plan = tuner(plan, context)
    return plan


def tune_tiles(plan: Plan, context: Context) -> Plan:
    """Kernels cut as measured on this GPU, in the modes that tune."""
    is_there = torch.cuda.is_available() and not context.settings.gpu.interpret
    if context.target.gpu is None or not context.settings.max_autotune or not is_there:
        return plan
    backend = backend_of(context.target)

    def build(alone: Plan, tile: Tile) -> tuple[TritonSources, tuple[Entry, ...]]:
        sources = backend.generate(with_tile(alone, tile), context)
        return sources, backend.build(sources, context)

    def load(alone: Plan) -> Callable[[Tile], Run]:
        inputs = random_inputs(alone.program, context.device)

        def run_of(tile: Tile) -> Run:
            sources, built = build(alone, tile)
            host = backend.host(with_tile(alone, tile), sources, context)
            call = backend.load(host, built, {}, context)
            return lambda: call(list(inputs))

        return run_of

    with disable_dispatch_modes():
        device = Device(build, load, event_timer(context.device))
        return measured_tiles(plan, context, device)


TUNERS: list[Tuner] = [tune_matmuls, tune_contractions, tune_tiles]
