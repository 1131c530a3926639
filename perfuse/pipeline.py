"""The whole story of one graph, a line a stage."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

from perfuse.autotune.products import choose_products
from perfuse.autotune.tiles import choose_tiles
from perfuse.build import LIBRARY, build_shared_library
from perfuse.build.fitting import build_fitting
from perfuse.build.manifest import Entry
from perfuse.build.triton import build_bundle
from perfuse.codegen.cpp.unit import CppSources, generate_sources
from perfuse.codegen.host.gpu import generate_gpu_host
from perfuse.codegen.host.program import HostSource, generate_host
from perfuse.codegen.triton.sources import TritonSources
from perfuse.codegen.triton.tiling import Tile
from perfuse.codegen.triton.unit import generate_triton
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.errors import PerfuseError
from perfuse.graph.passes import run_passes
from perfuse.ir.program import Extern, Loop, Program
from perfuse.ir.verify import verify_program
from perfuse.logs import channel
from perfuse.lower.graph import lower_graph
from perfuse.runtime.executable import Call, bind
from perfuse.runtime.launch import load_gpu
from perfuse.runtime.measure import made_up_inputs, seconds
from perfuse.schedule.plan import Plan
from perfuse.schedule.schedule import schedule
from perfuse.schedule.verify import verify_plan
from perfuse.torch_compat import disable_dispatch_modes

R = TypeVar("R")
Finished = tuple[CppSources | TritonSources, HostSource, Callable[[], Call], str | None]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Every artefact of one graph, and the function that runs it."""

    module: GraphModule
    program: Program
    plan: Plan
    sources: CppSources | TritonSources
    host: HostSource
    call: Call
    library: str | None  # key of the shared library, or of the bundle of kernels, in the store
    counts: dict[str, int]  # what was counted on the way to the sources
    seconds: dict[str, float]  # how long each stage took
    context: Context  # what it was compiled for, and under which settings

    @property
    def kind(self) -> str:
        """Whether the graph is a "forward" (or inference) or a "backward": that takes tangents.

        Marks on nodes do not say: a forward may compute early what the backward needs.
        """
        inputs = self.module.graph.find_nodes(op="placeholder")
        return "backward" if any("tangents" in node.name for node in inputs) else "forward"

    def texts(self) -> tuple[str, ...]:
        """The generated sources: C++ or Triton, then the host program."""
        if isinstance(self.sources, TritonSources):
            return (self.sources.text, self.host.text)
        return (*(text for _, text in self.sources.units), self.host.text)


def compile_graph(module: GraphModule, context: Context, loads: bool = True) -> Compiled:
    """From an ATen graph to something that runs; not loaded, it can only be looked at."""
    run, own = Stages(), dataclasses.replace(context, counters=Counters())
    limits = context.settings.thresholds
    module = run("passes", run_passes, module, limits)  # algebra, common subexpressions, dead code
    program = run("lower", lower_graph, module, own)  # formulas, loops and calls
    on_gpu = context.target.gpu is not None
    if not on_gpu:
        program = run("tune", choose_products, program, own)  # which library multiplies fastest
    if context.settings.verify:
        verify_program(program, "lower")
    plan = run("schedule", schedule, program, own)  # which loops share a kernel
    if context.settings.verify:
        verify_plan(plan)
    finish = _for_gpu if on_gpu else _for_cpu
    sources, host, load, key = finish(run, plan, own, context)  # text, and what is built of it
    call = run("load", load) if loads else _not_loaded
    counts = _counted(own.counters, context)
    made = Compiled(module, program, plan, sources, host, call, key, counts, run.seconds, context)
    _log(made)
    return made


def _log(compiled: Compiled) -> None:
    """Report fusion, fallbacks and times to those who listen."""
    plan, fusion, fallback = compiled.plan, channel("fusion"), channel("fallback")
    if fusion.isEnabledFor(logging.INFO):
        loops = sum(isinstance(node, Loop) for node in plan.program.nodes)
        num_refused = len(plan.refusals)
        fusion.info("%d loops -> %d kernels, %d refused", loops, len(plan.kernels), num_refused)
        for reason, count in Counter(r.reason for r in plan.refusals).most_common():
            fusion.info("  %dx refused: %s", count, reason)
    for refusal in plan.refusals:
        fusion.debug("  %s", refusal)
    for step in plan.steps:
        if isinstance(step, Extern):
            fallback.info("%s: %s (%s)", step.op, step.reason, step.origin or "no source line")
    told = ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in compiled.seconds.items())
    channel("compile").info("%d nodes compiled: %s", len(compiled.module.graph.nodes), told)


def _for_cpu(run: Stages, plan: Plan, own: Context, context: Context) -> Finished:
    sources = run("codegen", generate_sources, plan, own)  # C++ text
    keeps_frames = context.settings.memory_budget is None
    host = run("host", generate_host, plan, sources, keeps_frames)  # the program that launches
    entry = run("build", build_shared_library, sources.units, context) if sources.units else None
    library = None if entry is None else entry.read_bytes(LIBRARY)
    load = partial(bind, host, library, plan.program.constants, context.settings)
    return sources, host, load, None if entry is None else entry.key


def _for_gpu(run: Stages, plan: Plan, own: Context, context: Context) -> Finished:
    tiles = run("tune", _measured_tiles, plan, context)  # how kernels are cut, where measured
    sources = run("codegen", generate_triton, plan, own, tiles)  # Triton text
    sources, entry = run("build", build_fitting, plan, sources, tiles, context)  # machine code
    host = run("host", generate_gpu_host, plan, sources, context.device)
    load = partial(load_gpu, host, entry, plan.program.constants, context)
    return sources, host, load, entry.key


def _not_loaded(args: list[Any]) -> tuple[Any, ...]:
    raise PerfuseError("this graph was cross-compiled and cannot run here")


def _measured_tiles(plan: Plan, context: Context) -> dict[str, Tile]:
    """Tiles that were raced on this GPU; none in modes that do not tune, or without it."""
    is_there = torch.cuda.is_available() and not context.settings.gpu.interpret
    if not context.settings.max_autotune or not is_there:
        return {}

    def build(alone: Plan, tile: Tile) -> tuple[TritonSources, Entry]:
        sources = generate_triton(alone, context, {alone.kernels[0].name: tile})
        return sources, build_bundle(sources, context)

    def measure(alone: Plan, tile: Tile) -> float:
        sources, entry = build(alone, tile)
        host = generate_gpu_host(alone, sources, context.device)
        call = load_gpu(host, entry, {}, context)
        return seconds(call, made_up_inputs(alone.program, context.device), context.device)

    with disable_dispatch_modes():
        return choose_tiles(plan, context, measure, build)


class Stages:
    """Runs stages and keeps how long each took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, stage: Callable[..., R], *args: Any) -> R:
        start = time.perf_counter()
        result = stage(*args)
        self.seconds[name] = time.perf_counter() - start
        return result


def _counted(counters: Counters, context: Context) -> dict[str, int]:
    """What was counted while compiling, passed on to where the context counts."""
    counts = counters.snapshot()
    for name, n in counts.items():
        context.counters.inc(name, n)
    return counts
