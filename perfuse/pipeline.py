"""The whole pipeline of one graph, one line per stage, in the same order on every device."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from torch.fx import GraphModule

from perfuse.autotune.tune import tune
from perfuse.backends import Backend, Sources, backend_of
from perfuse.cache.manifest import Entry
from perfuse.codegen.host.source import HostSource
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.decision import Decision
from perfuse.errors import KernelTooLarge, PerfuseError
from perfuse.graph.passes import ATEN_PASSES, run_passes
from perfuse.ir.program import Extern, Loop, Program
from perfuse.ir.verify import verify_program
from perfuse.logs import channel
from perfuse.lower.graph import lower_graph
from perfuse.runtime.host_names import Call
from perfuse.schedule.plan import Plan
from perfuse.schedule.schedule import fuse, place
from perfuse.schedule.verify import verify_plan
from perfuse.torch_compat.graphs import GraphKind

P = ParamSpec("P")
R = TypeVar("R")


class Stages:
    """Runs stages and records how long each took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, stage: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        start = time.perf_counter()
        result = stage(*args, **kwargs)
        self.seconds[name] = time.perf_counter() - start
        return result


@dataclass(frozen=True, slots=True)
class Planned:
    """A graph after planning, before code generation."""

    module: GraphModule  # after the passes
    program: Program
    plan: Plan


@dataclass(frozen=True, slots=True)
class Compiled:
    """Every artefact of one graph, and the function that runs it."""

    module: GraphModule
    program: Program
    plan: Plan
    sources: Sources
    host: HostSource
    call: Call
    built: tuple[Entry, ...]  # the store's entries of its libraries and bundles
    counts: dict[str, int]  # counters up to the sources
    seconds: dict[str, float]  # how long each stage took
    context: Context  # what it was compiled for, and under which settings

    @property
    def kind(self) -> GraphKind:
        """The kind: a graph that takes tangents is a backward, others count as a forward.

        Marks on nodes do not show it: a forward may compute values for the backward.
        """
        inputs = self.module.graph.find_nodes(op="placeholder")
        is_backward = any("tangents" in node.name for node in inputs)
        return GraphKind.BACKWARD if is_backward else GraphKind.FORWARD

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The measured choices among implementations, made now or by an earlier compile."""
        return self.plan.decisions

    @property
    def library(self) -> str | None:
        """The key of its shared library, or of its bundle of kernels, in the store."""
        return self.built[0].key if self.built else None

    def texts(self) -> tuple[str, ...]:
        """The generated sources: C++ or Triton, then the host program."""
        return (*self.sources.texts, self.host.text)


def compile_graph(module: GraphModule, context: Context, loads: bool = True) -> Compiled:
    """Compile an ATen graph; without `loads` the result can be inspected but not called."""
    run, own = Stages(), dataclasses.replace(context, counters=Counters())
    backend = backend_of(context.target)
    planned = plan_graph(module, own, run)
    sources = run("codegen", backend.generate, planned.plan, own)  # C++ or Triton text
    plan, sources, built = run("build", _built, planned.plan, sources, backend, context)
    host = run("host", backend.host, plan, sources, context)  # the program that launches
    constants = plan.program.constants
    call = run("load", backend.load, host, built, constants, context) if loads else _not_loaded
    compiled = Compiled(
        module=planned.module,
        program=planned.program,
        plan=plan,
        sources=sources,
        host=host,
        call=call,
        built=built,
        counts=_counted(own.counters, context),
        seconds=run.seconds,
        context=context,
    )
    _log(compiled)
    return compiled


def fused_plan(module: GraphModule, context: Context) -> Plan:
    """The plan of an ATen graph as it is passed to tuners."""
    program = lower_graph(run_passes(module, context, ATEN_PASSES), context)
    return fuse(program, context)


def plan_graph(module: GraphModule, context: Context, run: Stages | None = None) -> Planned:
    """Plan an ATen graph: kernels and library calls in order, with memory for their results."""
    run = run or Stages()
    module = run("passes", run_passes, module, context, ATEN_PASSES)  # algebra, dead code
    program = run("lower", lower_graph, module, context)  # formulas, loops and library calls
    if context.settings.verify:
        verify_program(program, "lower")
    plan = run("fuse", fuse, program, context)  # which loops share a kernel
    plan = run("tune", tune, plan, context)  # the fastest implementations, by measurement
    plan = run("place", place, plan, context)  # where temporaries are
    if context.settings.verify:
        verify_plan(plan)
    return Planned(module, program, plan)


def _built(
    plan: Plan, sources: Any, backend: Backend, context: Context
) -> tuple[Plan, Any, tuple[Entry, ...]]:
    """Build the sources; kernels that exceed the limits of a block get smaller tiles first."""
    while True:
        try:
            return plan, sources, backend.build(sources, context)
        except KernelTooLarge as error:
            if backend.retile is None:
                raise
            plan = backend.retile(plan, sources, error, context)
            context.counters.inc("build.tiles_made_smaller", len(error.kernels))
            sources = backend.generate(plan, context)


def _log(compiled: Compiled) -> None:
    """Log fusion, fallbacks and stage times."""
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
    times = ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in compiled.seconds.items())
    channel("compile").info("%d nodes compiled: %s", len(compiled.module.graph.nodes), times)


def _not_loaded(args: list[Any]) -> tuple[Any, ...]:
    raise PerfuseError("this graph was cross-compiled and cannot run here")


def _counted(counters: Counters, context: Context) -> dict[str, int]:
    """The counts of a compile, added to the context's own counters."""
    counts = counters.snapshot()
    for name, n in counts.items():
        context.counters.inc(name, n)
    return counts
