"""From Dynamo's graph to functional ATen graphs: what every way to compile does first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from perfuse.config import Settings
from perfuse.graph.decompositions import decomposition_table
from perfuse.graph.known_masks import use_known_masks
from perfuse.torch_compat import aot_compile_graph


def trace(
    module: GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    *,
    compiler: Callable[[str, GraphModule], Any],
    partition: Callable[..., tuple[GraphModule, GraphModule]],
) -> Callable[..., Any]:
    """What runs the graphs; `compiler` gets each with its kind, `partition` the joint one."""
    return aot_compile_graph(
        use_known_masks(module),
        example_inputs,
        compiler=compiler,
        decompositions=decomposition_table(fallback_random=settings.fallback_random),
        partition=partition,
    )
