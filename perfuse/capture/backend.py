"""`perfuse_backend`: what `torch.compile(..., backend="perfuse")` calls with each captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from perfuse import pipeline
from perfuse.context import Context
from perfuse.graph.decompositions import decomposition_table
from perfuse.graph.partition import plain_partition
from perfuse.torch_compat import aot_compile_graph


def perfuse_backend(
    module: GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Callable[..., Any]:
    """Compile a Dynamo graph: forward now, backward too if gradients are wanted."""
    context = Context.default()

    def compile_one(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return pipeline.compile_graph(graph, context).call

    return aot_compile_graph(
        module,
        example_inputs,
        compiler=compile_one,
        decompositions=decomposition_table(),
        partition=plain_partition,
    )
