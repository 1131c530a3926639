"""Values that are compared with elements chosen from among themselves.

The gradient of a maximum goes to the elements that equal it, divided by their number. Computed
again in the backward, in another kernel, the elements may be rounded differently: then none is
equal to the maximum that was saved, and the gradient is 0 / 0. So such values, or the result
of the comparison, cross to the backward.
"""

from torch.fx import Graph, GraphModule, Node

from perfuse.graph.aliases import is_view, users_through
from perfuse.graph.copying import GraphCopy, copy_but_for
from perfuse.graph.facts import ROUNDED, is_part, packet_name, tensor_of

_COMPARISONS = frozenset({"eq", "ge", "gt", "isclose", "le", "lt", "ne"})

# Library calls that compare, in themselves, what follows the gradient with their saved result.
_COMPARING_CALLS = frozenset({"_cdist_backward", "_pdist_backward", "_segment_reduce_backward"})

# Choices that are in memory, rounded: what is computed from them and from the elements, in other
# loops, must see the same elements.
_CHOICES_IN_MEMORY = frozenset(
    """cummax cummin index_reduce kthvalue median mode nanmedian segment_reduce sort topk""".split()
)
_EXTREMES = frozenset("amax amin aminmax max min".split())

# Each element of the result is an element of an argument, or exactly determined by one.
_CHOOSING = frozenset(
    """_adaptive_max_pool2d _to_copy _unsafe_view abs adaptive_max_pool2d adaptive_max_pool3d amax
    amin aminmax cat clamp clamp_max clamp_min clone constant_pad_nd copy cummax cummin flip fmax
    fmin gather index index_put index_reduce index_select kthvalue masked_fill max
    max_pool2d_with_indices max_pool3d_with_indices maximum median min minimum mode nanmedian neg
    relu roll scatter scatter_reduce select_scatter slice_scatter sort take topk where""".split()
)


def mark_compared(gm: GraphModule) -> GraphModule:
    """The pass on joint graphs: marks these values for both halves."""
    compared = compared_with_themselves(gm.graph)

    def marked(node: Node, new: GraphCopy) -> Node:
        copied = new.copy(node)
        if node in compared:
            copied.meta[ROUNDED] = True
        return copied

    return copy_but_for(gm, marked) if compared else gm


def compared_with_themselves(graph: Graph) -> frozenset[Node]:
    """The values from which both sides of a comparison are chosen, and what such calls read."""
    sources, of_node = _sources(graph)
    compared = 0
    for node in graph.nodes:
        if packet_name(node) in _COMPARING_CALLS:
            for side in node.all_input_nodes[1:]:
                compared |= of_node[side]
        if _is_kept_choice(node):
            for source in filter(_is_float, node.all_input_nodes):
                compared |= of_node[source]
        sides = node.all_input_nodes if packet_name(node) in _COMPARISONS else []
        if len(sides) == 2 and all(map(_is_float, sides)):
            compared |= of_node[sides[0]] & of_node[sides[1]]
    return frozenset(n for place, n in enumerate(sources) if compared >> place & 1)


def _sources(graph: Graph) -> tuple[list[Node], dict[Node, int]]:
    """The computed values, and for each node the set of those (a bit each) whose elements it has.

    Bits, because a long chain of choices would make each of its sets as long as the chain.
    """
    sources: list[Node] = []
    of_node: dict[Node, int] = {}
    for node in graph.nodes:
        if is_part(node) or is_view(node) or packet_name(node) in _CHOOSING:
            chosen = 0
            for source in node.all_input_nodes:
                chosen |= of_node[source] if _is_float(source) else 0
            of_node[node] = chosen
        else:
            of_node[node] = 1 << len(sources)
            sources.append(node)
    return sources, of_node


def _is_kept_choice(node: Node) -> bool:
    """Whether elements are chosen that all readers get from memory."""
    name = packet_name(node)
    if name not in _EXTREMES:
        return name in _CHOICES_IN_MEMORY
    return any(user.op == "output" for user in users_through(node, _is_same_memory))


def _is_same_memory(node: Node) -> bool:
    return is_part(node) or is_view(node)


def _is_float(node: Node) -> bool:
    """Whether a value has roundings: a tuple may."""
    tensor = tensor_of(node)
    return tensor is None or tensor.is_floating_point()
