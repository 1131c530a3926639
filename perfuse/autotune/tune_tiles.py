"""`tune_tiles`: kernels of a GPU cut as measured on it, or as remembered."""

from __future__ import annotations

from collections.abc import Callable

import torch

from perfuse.autotune.program_request import random_inputs
from perfuse.autotune.race import Run
from perfuse.autotune.stored import is_consulted
from perfuse.autotune.tiles import Device, is_sharing, measured_tiles
from perfuse.backends import backend_of
from perfuse.cache.manifest import Entry
from perfuse.codegen.triton.sources import TritonSources
from perfuse.context import Context
from perfuse.runtime.measure import event_timer
from perfuse.schedule.plan import Plan, with_tile
from perfuse.schedule.tile import Tile
from perfuse.torch_compat.state import disable_dispatch_modes


def tune_tiles(plan: Plan, context: Context) -> Plan:
    """Kernels cut as measured on this GPU in the modes that tune, in others as remembered.

    Where decisions are shared, default mode measures too: its second serves every machine.
    """
    if context.target.gpu is None:
        return plan
    is_there = torch.cuda.is_available() and not context.settings.gpu.interpret
    if (context.settings.max_autotune or is_sharing(context)) and is_there:
        with disable_dispatch_modes():
            return measured_tiles(plan, context, _device(context))
    return measured_tiles(plan, context, None) if is_consulted(context) else plan


def _device(context: Context) -> Device:
    backend = backend_of(context.target)

    def build(alone: Plan, tile: Tile) -> tuple[TritonSources, tuple[Entry, ...]]:
        sources = backend.generate(with_tile(alone, tile), context)
        return sources, backend.build(sources, context)

    def load(alone: Plan) -> Callable[[Tile], Run]:
        inputs = list(random_inputs(alone.program, context.device).values())

        def run_of(tile: Tile) -> Run:
            sources, built = build(alone, tile)
            host = backend.host(with_tile(alone, tile), sources, context)
            call = backend.load(host, built, {}, context)
            return lambda: call(list(inputs))

        return run_of

    return Device(build, load, event_timer(context.device))
