"""Dynamo graphs that take lists: compiled autograd passes the saved tensors in one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

Call = Callable[..., Any]
_NAMES = "dynamo_flat_name_to_original_fqn"  # says that every placeholder has a source


def takes_lists(inputs: Sequence[Any]) -> bool:
    """Whether a graph with these inputs has to be flattened."""
    return any(isinstance(x, list) for x in inputs)


def flattened(module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """The same graph, with an input for each element of a list."""
    made, values = Graph(), dict[Node, Any]()
    placeholders = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder" and isinstance(given := next(placeholders), list):
            values[node] = [made.placeholder(f"{node.name}_{k}") for k in range(len(given))]
        elif node.target is operator.getitem and isinstance(values[node.args[0]], list):
            values[node] = _element(values[node.args[0]][node.args[1]], node)
        else:
            values[node] = made.node_copy(node, values.__getitem__)
    result = GraphModule(module, made)
    result.meta = {key: value for key, value in module.meta.items() if key != _NAMES}
    return result


def flat(args: Sequence[Any]) -> list[Any]:
    """The arguments of the flattened graph."""
    return [x for a in args for x in (a if isinstance(a, list) else [a])]


def with_lists(call: Call, module: GraphModule) -> Call:
    """The call of the flattened graph, for the arguments of `module`.

    A list that Dynamo gives up is emptied: nothing else refers to the tensors in it.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    given_up = [i for i, node in enumerate(inputs) if node.meta.get("steal_arg")]

    def run(*args: Any) -> Any:
        tensors = flat(args)
        for i in given_up:
            args[i].clear()
        return call(*tensors)

    return run


def _element(placeholder: Node, read: Node) -> Node:
    """The placeholder of an element, with what is known of the element that is read."""
    placeholder.meta = {**read.meta, **placeholder.meta}
    return placeholder
