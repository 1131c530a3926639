"""Copies of graphs, except for the nodes that a pass replaces."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from perfuse.graph.blame import working_on
from perfuse.torch_compat.graphs import empty_like, module_of


class GraphCopy:
    """A new graph under construction: `of` maps each node of the old one to its replacement."""

    def __init__(self, source: Graph) -> None:
        self.graph = empty_like(source)
        self.of: dict[Node, Node] = {}

    def copy(self, node: Node) -> Node:
        """`node` at the end of the new graph."""
        return copy_node(self.graph, node, self.of)


# The replacement of a node in the new graph; None leaves it out.
Make = Callable[[Node, GraphCopy], Node | None]


def copy_but_for(
    gm: GraphModule, make: Make, attributes: Mapping[str, Any] | None = None
) -> GraphModule:
    """A new module of what `make` returns for each node, in order.

    `attributes` are those of the new module, where they differ from the old one's; they are read
    when all nodes are made.
    """
    new = copied_graph(gm.graph, make)
    return module_of(gm if attributes is None else attributes, new)


def copied_graph(graph: Graph, make: Make) -> Graph:
    """A new graph of what `make` returns for each node, in order."""
    new = GraphCopy(graph)
    for node in graph.nodes:
        with working_on(node):
            made = make(node, new)
        if made is not None:
            new.of[node] = made
    return new.graph


def copy_node(graph: Graph, node: Node, copies: Mapping[Node, Node]) -> Node:
    """`node` at the end of `graph`, reading the copies of what it read.

    Graph.node_copy does the same and searches the arguments for symbols, which was already done
    when the node was created: twice the time, and passes copy every node.
    """
    made = graph.create_node(node.op, node.target, (), {}, node.name, node.type)
    if node.args:
        made.args = map_arg(node.args, copies.__getitem__)
    if node.kwargs:
        made.kwargs = map_arg(node.kwargs, copies.__getitem__)
    made.meta = node.meta.copy()
    return made
