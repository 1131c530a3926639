"""Which device a captured graph computes on."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from perfuse.context import CPU


def device_of(module: GraphModule, inputs: Sequence[Any]) -> torch.device:
    """The GPU of the graph's tensors, the first if there are several; else the CPU."""
    for value in (*inputs, *_traced(module)):
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return value.device
    return CPU


def _traced(module: GraphModule) -> Iterator[Any]:
    for node in module.graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        yield from value if isinstance(value, list | tuple) else [value]
