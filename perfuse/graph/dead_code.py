"""Dead code elimination: nodes without users or effects are removed."""

from torch.fx import Graph, GraphModule, Node

from perfuse.graph.copying import copy_but_for
from perfuse.graph.facts import has_effects


def eliminate_dead_code(gm: GraphModule) -> GraphModule:
    """The pass. An unused random op is removed too: no later value depends on it."""
    live = _live_nodes(gm.graph)
    if len(live) == len(gm.graph.nodes):
        return gm
    return copy_but_for(gm, lambda node, new: new.copy(node) if node in live else None)


def _live_nodes(graph: Graph) -> set[Node]:
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        is_root = node.op in ("placeholder", "output") or has_effects(node)
        if is_root or node in live:
            live.add(node)
            live.update(node.all_input_nodes)
    return live
