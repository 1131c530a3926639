"""`tune`: choices made by measurement, each a function from Plan to Plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from perfuse.autotune.products import choose_products
from perfuse.autotune.tiles import choose_tiles
from perfuse.backends import backend_of
from perfuse.cache.manifest import Entry
from perfuse.codegen.triton.sources import TritonSources
from perfuse.context import Context
from perfuse.ir.program import LibraryCall
from perfuse.runtime.measure import made_up_inputs, seconds
from perfuse.schedule.plan import Plan, with_tile
from perfuse.schedule.tile import Tile
from perfuse.torch_compat import disable_dispatch_modes

Tuner = Callable[[Plan, Context], Plan]


def tune(plan: Plan, context: Context) -> Plan:
    """The plan with every choice that was measured on this machine."""
    for tuner in TUNERS:
        plan = tuner(plan, context)
    return plan


def tune_matmuls(plan: Plan, context: Context) -> Plan:
    """Each large matmul as the library call that is fastest on this CPU."""
    if context.target.gpu is not None:
        return plan
    program = choose_products(plan.program, context)
    calls = {
        id(node): tuned
        for node, tuned in zip(plan.program.nodes, program.nodes, strict=True)
        if isinstance(tuned, LibraryCall)
    }
    steps = tuple(calls.get(id(step), step) for step in plan.steps)
    return replace(plan, program=program, steps=steps)


def tune_tiles(plan: Plan, context: Context) -> Plan:
    """Kernels cut as measured on this GPU, in the modes that tune."""
    is_there = torch.cuda.is_available() and not context.settings.gpu.interpret
    if context.target.gpu is None or not context.settings.max_autotune or not is_there:
        return plan
    backend = backend_of(context.target)

    def build(alone: Plan, tile: Tile) -> tuple[TritonSources, tuple[Entry, ...]]:
        sources = backend.generate(with_tile(alone, tile), context)
        return sources, backend.build(sources, context)

    def measure(alone: Plan, tile: Tile) -> float:
        sources, built = build(alone, tile)
        host = backend.host(with_tile(alone, tile), sources, context)
        call = backend.load(host, built, {}, context)
        return seconds(call, made_up_inputs(alone.program, context.device), context.device)

    with disable_dispatch_modes():
        return replace(plan, tiles=choose_tiles(plan, context, measure, build))


TUNERS: list[Tuner] = [tune_matmuls, tune_tiles]
