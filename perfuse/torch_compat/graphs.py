"""FX graphs and nested values."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule


class GraphKind(StrEnum):
    """The kind of an ATen graph of a capture."""

    FORWARD, BACKWARD, INFERENCE = "forward", "backward", "inference"


def source_line(node: Any) -> str:
    """The user's line an FX node comes from, the innermost not PyTorch's own: file:line, or ""."""
    frames = []
    for line in (node.meta.get("stack_trace") or "").splitlines():
        line = line.strip()
        parts = line.split('"')
        if line.startswith("File ") and len(parts) > 1:
            number = line.rsplit("line ", 1)[-1].split(",")[0]
            frames.append(f"{parts[1]}:{number}")
    own = [frame for frame in frames if not frame.startswith(_TORCH_FOLDER)]
    return (own or frames or [""])[-1]


_TORCH_FOLDER = f"{Path(torch.__file__).parent}/"


def without_decompositions() -> AbstractContextManager[Any]:
    """A block of a trace in which ops stay whole."""
    from torch.fx.experimental.proxy_tensor import decompose

    return decompose({})


def module_of(root: Any, graph: Graph) -> GraphModule:
    """A module that runs `graph`, whose Python code is only generated when it is called."""
    return _LazyGraphModule(root, graph)


def tree_leaves(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of nested lists, tuples and dictionaries, in order."""
    leaves: list[Any] = torch.utils._pytree.tree_leaves(value, is_leaf)
    return leaves


def tree_map(change: Callable[[Any], Any], value: Any) -> Any:
    """Nested lists, tuples and dictionaries with every leaf changed."""
    return torch.utils._pytree.tree_map(change, value)


def empty_like(graph: Graph) -> Graph:
    """A new graph that is called as this one is."""
    made = Graph()
    made._codegen = graph._codegen
    return made


def is_drawn_number(placeholder: Node) -> bool:
    """Whether a graph of Dynamo's takes a number of Python's `random` here, as a tensor."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return type(source).__name__ == "RandomValueSource"


def last_node(graph: Graph) -> Node:
    """The node that was appended last; of an empty graph, what stands before the first."""
    last: Node = graph._root.prev
    return last
