"""One capture for every caller: a Dynamo graph, traced once, becomes functional ATen graphs.

Callers differ in how they cut the joint graph and in what runs each graph; `cut_for` is the cut
for a context, with its memory budget, the same for all callers.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from perfuse.budget.choose import choose_cut
from perfuse.capture.failure import compile_or_eager
from perfuse.capture.freeze import freeze_graph
from perfuse.capture.observe import Observer, cut_observers
from perfuse.capture.pause_gc import paused_gc
from perfuse.capture.replay import replayed
from perfuse.context import Context
from perfuse.graph.alias_results import as_views_of_inputs
from perfuse.graph.decompositions import decomposition_table
from perfuse.graph.partition import Cut, Joint
from perfuse.graph.passes import DYNAMO_PASSES, run_passes
from perfuse.graph_cache import Executable, load_or_compile
from perfuse.pipeline import Compiled
from perfuse.runtime.host_names import Call
from perfuse.torch_compat.autograd import aot_compile_graph, overwritten_aliases
from perfuse.torch_compat.graphs import GraphKind


def cut_for(context: Context, joint: GraphModule, num_results: int) -> tuple[Cut, bool]:
    """The joint graph cut according to the settings, and whether that meets the memory budget."""
    found = choose_cut(Joint.of(joint, num_results, context), context)
    for observer in cut_observers():
        observer(found[0], context)
    return found


@dataclass(slots=True)
class Capture:
    """The ATen graphs of one Dynamo graph: one for inference, or a forward and a backward."""

    context: Context
    cut: Callable[[GraphModule, int], Cut]  # of a joint graph and its number of results
    run: Callable[[GraphKind, GraphModule], Call]  # takes each graph, and returns its callable
    graphs: dict[GraphKind, GraphModule] = field(default_factory=dict)

    def trace(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The callable that runs the graphs under AOTAutograd."""
        settings = self.context.settings
        return aot_compile_graph(
            run_passes(module, self.context, DYNAMO_PASSES),
            inputs,
            compiler=self.take,
            decompositions=decomposition_table(fallback_random=settings.fallback_random),
            partition=self.partition,
        )

    def take(self, kind: GraphKind, graph: GraphModule) -> Call:
        """Pass on one of the graphs."""
        if kind is not GraphKind.BACKWARD:
            as_views_of_inputs(graph.graph, overwritten_aliases())
        self.graphs[kind] = graph
        return self.run(kind, graph)

    def partition(
        self, joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Cut the joint graph. The backward is passed on when it first runs, if ever."""
        cut = self.cut(joint, num_fwd_outputs)
        self.graphs[GraphKind.BACKWARD] = cut.backward
        return cut.forward, cut.backward


class TrainingGraphs:
    """A capture whose graphs are compiled and run: a forward with its backward, or inference."""

    def __init__(self, context: Context, watching: Sequence[Observer]) -> None:
        self.context = context
        self.watching = watching
        self.capture = Capture(context, self._cut, self._compile)
        self.executables: dict[GraphKind, Executable] = {}
        # How many of the results are the user's: the rest are saved values, or gradients.
        self.num_results = {**dict.fromkeys(GraphKind, 0), GraphKind.INFERENCE: sys.maxsize}
        self.keeps_budget = True

    @property
    def forward(self) -> Executable:
        """The graph that runs first: the forward or the inference graph."""
        return self.executables.get(GraphKind.FORWARD) or self.executables[GraphKind.INFERENCE]

    def backward(self) -> Executable:
        """The backward, compiled now."""
        self.capture.take(GraphKind.BACKWARD, self.capture.graphs.pop(GraphKind.BACKWARD))
        return self.executables[GraphKind.BACKWARD]

    def _cut(self, joint: GraphModule, num_results: int) -> Cut:
        cut, self.keeps_budget = cut_for(self.context, joint, num_results)
        self.num_results[GraphKind.FORWARD] = num_results
        return cut

    def _compile(self, kind: GraphKind, graph: GraphModule) -> Call:
        with paused_gc():  # a backward is compiled long after its capture
            made = compile_or_eager(
                graph, self.context, kind, lambda: self._executable(kind, graph)
            )
        self.executables[kind] = made
        return made.call

    def _executable(self, kind: GraphKind, graph: GraphModule) -> Executable:
        observe = self._observe if self.watching else None

        def compile_it(module: GraphModule) -> Executable:
            made = load_or_compile(module, self.context, observe)
            return replayed(made, kind, self.num_results[kind], self.context)

        is_frozen = kind is GraphKind.INFERENCE and self.context.settings.freeze
        return freeze_graph(graph, self.context, compile_it) if is_frozen else compile_it(graph)

    def _observe(self, compiled: Compiled) -> None:
        for observer in self.watching:
            observer(compiled)
