"""Nodes whose value nobody reads go, unless they do something besides."""

from torch.fx import Graph, GraphModule, Node

from perfuse.graph.copying import copy_node
from perfuse.graph.facts import has_effects
from perfuse.torch_compat import module_of


def eliminate_dead_code(gm: GraphModule) -> GraphModule:
    """The pass. A random op nobody reads goes too: no later value depends on it having run."""
    live = _live_nodes(gm.graph)
    if len(live) == len(gm.graph.nodes):
        return gm
    new = Graph()
    copy: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if node in live:
            copy[node] = copy_node(new, node, copy)
    new._codegen = gm.graph._codegen
    return module_of(gm, new)


def _live_nodes(graph: Graph) -> set[Node]:
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        is_root = node.op in ("placeholder", "output") or has_effects(node)
        if is_root or node in live:
            live.add(node)
            live.update(node.all_input_nodes)
    return live
