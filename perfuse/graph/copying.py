"""The copy of a node in another graph."""

from collections.abc import Mapping

from torch.fx import Graph, Node
from torch.fx.node import map_arg


def copy_node(graph: Graph, node: Node, copies: Mapping[Node, Node]) -> Node:
    """`node` at the end of `graph`, reading the copies of what it read.

    Graph.node_copy does the same and looks for symbols among the arguments, which a node that
    exists was asked for when it was made: twice the time, and passes copy every node.
    """
    made = graph.create_node(node.op, node.target, (), {}, node.name, node.type)
    if node.args:
        made.args = map_arg(node.args, copies.__getitem__)
    if node.kwargs:
        made.kwargs = map_arg(node.kwargs, copies.__getitem__)
    made.meta = node.meta.copy()
    return made
