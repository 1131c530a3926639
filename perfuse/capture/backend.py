"""`perfuse_backend`: what `torch.compile(..., backend="perfuse")` calls with each graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from perfuse import config, pipeline
from perfuse.capture.modes import settings_for
from perfuse.capture.observe import observers
from perfuse.context import Context
from perfuse.graph.decompositions import decomposition_table
from perfuse.graph.partition import plain_partition
from perfuse.torch_compat import aot_compile_graph


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
    context = Context.default(settings_for(config.snapshot(), mode, options))
    watching = observers()

    def compile_one(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = pipeline.compile_graph(graph, context)
        for observer in watching:
            observer(compiled)
        return compiled.call

    return aot_compile_graph(
        module,
        example_inputs,
        compiler=compile_one,
        decompositions=decomposition_table(),
        partition=plain_partition,
    )
