"""`perfuse_backend`: what `torch.compile(..., backend="perfuse")` calls with each graph."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from perfuse import config
from perfuse.budget.choose import choose_cut
from perfuse.capture import capture_cache
from perfuse.capture.device import device_of
from perfuse.capture.facts import facts_of
from perfuse.capture.failure import compile_or_eager, warn_eager
from perfuse.capture.interpreter import check_interpreter
from perfuse.capture.modes import settings_for
from perfuse.capture.observe import Observer, cut_observers, observers
from perfuse.capture.pause_gc import pause_garbage_collection
from perfuse.capture.replay import replayed
from perfuse.capture.source_records import source_observers, summary
from perfuse.capture.trace import trace
from perfuse.context import Context
from perfuse.counters import counters
from perfuse.graph.partition import Joint
from perfuse.graph_cache import Executable, load_or_compile
from perfuse.logs import channel
from perfuse.pipeline import Compiled
from perfuse.runtime.executable import Call
from perfuse.runtime.wrapper import wrap
from perfuse.torch_compat import keep_checks, never_trace

LOG = channel("capture")

# When the backend is first named, which is before anything is captured for it. A backward that is
# compiled in the middle of a traced function is no part of that function.
pause_garbage_collection()
never_trace("perfuse")
keep_checks()


def perfuse_backend(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph: forward now, backward too if gradients are wanted.

    The settings are taken once, here: the backward is compiled under those of its forward.
    """
    check_interpreter()
    settings = settings_for(config.snapshot(), mode, options)
    try:
        context = Context.on(device_of(module, example_inputs), settings)
        return compile_capture(module, example_inputs, context)
    except Exception as error:
        if settings.on_error == "raise":
            raise
        warn_eager(error, counters)
        eager: Callable[..., Any] = module.forward
        return eager


def compile_capture(
    module: GraphModule, example_inputs: Sequence[Any], context: Context
) -> Callable[..., Any]:
    """What runs this capture: loaded, or else traced and compiled."""
    watching = (*observers(), *source_observers())
    key = capture_cache.key_of(module, example_inputs, context)
    is_watched = bool(watching or cut_observers())
    found = capture_cache.load_capture(key, context) if key is not None and not is_watched else None
    if found is not None:
        if LOG.isEnabledFor(logging.INFO):
            LOG.info("%s: loaded from the cache", summary(module))
        return found
    context.counters.inc("capture.traced")
    if LOG.isEnabledFor(logging.INFO):
        LOG.info("%s: traced and compiled for %s", summary(module), context.target)
    halves = TrainingGraphs(context, watching)
    traced = trace(
        module,
        example_inputs,
        context.settings,
        compiler=halves.compile,
        partition=halves.partition,
    )
    facts = facts_of(halves.graphs, len(example_inputs), context)
    if facts is None:
        return traced
    place = capture_cache.place_of(key, context)
    forward = halves.forward()
    if not facts.is_training:
        capture_cache.store_capture(place, forward, None, facts, context)
        return wrap(forward.call, None, facts)

    def backward() -> Call:
        call = halves.compile("backward", halves.graphs.pop("backward"))
        if halves.keeps_budget:  # a miss is to be told again by the next process
            capture_cache.store_capture(
                place, forward, halves.executables["backward"], facts, context
            )
        return call

    return wrap(forward.call, backward, facts)


class TrainingGraphs:
    """The graphs that a capture becomes, by kind, and what runs each."""

    def __init__(self, context: Context, watching: Sequence[Observer]) -> None:
        self.context = context
        self.watching = watching
        self.watching_cuts = cut_observers()
        self.graphs: dict[str, GraphModule] = {}
        self.executables: dict[str, Executable] = {}
        # How many of the results are the user's: the rest is saved, or gradients.
        self.num_results = {"inference": sys.maxsize, "forward": 0, "backward": 0}
        self.keeps_budget = True

    def partition(
        self, joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Cut the joint graph. The backward is compiled when it first runs, if ever."""
        whole = Joint.of(joint, num_fwd_outputs, self.context.settings)
        cut, self.keeps_budget = choose_cut(whole, self.context)
        for observer in self.watching_cuts:
            observer(cut, self.context)
        self.graphs["backward"] = cut.backward
        self.num_results["forward"] = num_fwd_outputs
        return cut.forward, cut.backward

    def compile(self, kind: str, graph: GraphModule) -> Call:
        """Compile one of them: forward, backward, or inference."""
        observe = self._observe if self.watching else None
        made = compile_or_eager(
            graph, self.context, kind, lambda: load_or_compile(graph, self.context, observe)
        )
        made = replayed(made, kind, self.num_results[kind], self.context)
        self.graphs[kind], self.executables[kind] = graph, made
        return made.call

    def forward(self) -> Executable:
        """What runs first: a forward or an inference graph."""
        return self.executables.get("forward") or self.executables["inference"]

    def _observe(self, compiled: Compiled) -> None:
        for observer in self.watching:
            observer(compiled)
