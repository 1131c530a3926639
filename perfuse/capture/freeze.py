"""`freeze_graph`: an inference graph whose parameters are treated as constants."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from perfuse.config import Settings
from perfuse.context import Context
from perfuse.errors import PerfuseError
from perfuse.graph.frozen import Split, mark_frozen, split_frozen
from perfuse.graph.passes import ATEN_PASSES, run_passes
from perfuse.graph_cache import Executable
from perfuse.logs import channel
from perfuse.runtime.prepared import prepared_call
from perfuse.torch_compat.autograd import static_inputs
from perfuse.torch_compat.state import disable_dispatch_modes

LOG = channel("capture")


def freeze_graph(
    graph: GraphModule, context: Context, compile_rest: Callable[[GraphModule], Executable]
) -> Executable:
    """The executable of a graph; `compile_rest` compiles the part that runs in every call.

    Passes run before the split: they write casts, copies, and joined or packed weights.
    """
    mark_frozen(graph, static_inputs())
    split = split_frozen(run_passes(graph, context, ATEN_PASSES))
    if split is None:
        return compile_rest(graph)
    _log(split, context)
    rest = compile_rest(split.rest)
    call = prepared_call(_preparation(split.prepare), rest.call, split.sources, split.passed)
    # The entry of the rest alone is not one of this graph.
    return dataclasses.replace(rest, call=call, key=None)


def refuse_frozen(settings: Settings, what: str) -> None:
    """Raise where parameters cannot be constants."""
    if settings.freeze:
        raise PerfuseError(
            f"{what} takes its parameters as inputs, so `freeze` does not apply",
            hint="turn `freeze` off; it applies to torch.compile only.",
        )


def _preparation(prepare: GraphModule) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The preparation, run op by op: it rarely runs, and is not worth compiling."""

    def run(held: Sequence[Any]) -> Sequence[Any]:
        with disable_dispatch_modes(), torch.no_grad():
            values: Sequence[Any] = torch.fx.Interpreter(prepare).run(*held)
            return values

    return run


def _log(split: Split, context: Context) -> None:
    num_values = len(split.rest.graph.find_nodes(op="placeholder")) - len(split.passed)
    context.counters.inc("freeze.prepared_values", num_values)
    if LOG.isEnabledFor(logging.INFO):
        LOG.info("%d values are prepared from %d parameters", num_values, len(split.sources))
