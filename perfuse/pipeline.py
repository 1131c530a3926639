"""The whole story of one graph, a line a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from perfuse.build import build_shared_library
from perfuse.codegen.cpp.unit import CppSources, generate_sources
from perfuse.codegen.host.program import HostSource, generate_host
from perfuse.context import Context
from perfuse.graph.passes import run_passes
from perfuse.ir.program import Program
from perfuse.lower.graph import lower_graph
from perfuse.runtime.executable import bind
from perfuse.schedule.plan import Plan
from perfuse.schedule.schedule import schedule


@dataclass(frozen=True, slots=True)
class Compiled:
    """Every artefact of one graph, and the function that runs it."""

    module: GraphModule
    program: Program
    plan: Plan
    sources: CppSources
    host: HostSource
    call: Callable[[list[Any]], tuple[Any, ...]]

    def texts(self) -> tuple[str, ...]:
        """The generated sources: C++, then the host program."""
        return (*(text for _, text in self.sources.units), self.host.text)


def compile_graph(module: GraphModule, context: Context) -> Compiled:
    """From an ATen graph to something that runs."""
    module = run_passes(module)  # algebra, common subexpressions, dead code
    program = lower_graph(module, context)  # formulas, loops and calls
    plan = schedule(program, context)  # which loops share a kernel
    sources = generate_sources(plan, context)  # C++ text
    host = generate_host(plan, sources)  # the program that launches
    library = str(build_shared_library(sources.units, context)) if sources.units else None
    call = bind(host, library, program.constants, context.settings.cpu.threads)
    return Compiled(module, program, plan, sources, host, call)
