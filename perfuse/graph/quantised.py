"""Values that are rounded to eight bits must match eager bit for bit before the rounding.

A difference in the last bit of a quotient or a half is invisible in a result of that precision, but
it moves a value near a tie to another code of eight bits. So every value on the way to such a
rounding is rounded where eager rounds it: to its own dtype, after each op.
"""

import torch
from torch.fx import Graph, Node

from perfuse.graph.aliases import is_view
from perfuse.graph.facts import is_part, packet_name, tensor_of

_EIGHT_BIT_INTEGERS = (torch.int8, torch.uint8)
_CASTS = frozenset({"_to_copy", "convert_element_type", "copy", "to"})
# Each element of the result is an element of an argument but for its sign: it is rounded already.
_CHOOSING = frozenset(
    """abs amax amin aminmax cat clone flip gather index index_select max maximum min minimum neg
    relu roll select_scatter slice_scatter sort topk _to_copy""".split()
)


def is_eight_bit(dtype: torch.dtype) -> bool:
    """Whether a float loses most of its bits in this dtype."""
    is_float = dtype.is_floating_point and dtype.itemsize == 1
    return is_float or dtype in _EIGHT_BIT_INTEGERS


def rounded_to_eight_bits(graph: Graph) -> frozenset[Node]:
    """The computed values that a cast from a float to eight bits depends on."""
    reached: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in reached or _quantises(node):
            reached.update(node.all_input_nodes)
    return frozenset(node for node in reached if _computes(node))


def _quantises(node: Node) -> bool:
    """Whether a node casts floats to eight bits; `copy` casts what it copies."""
    result = tensor_of(node)
    if packet_name(node) not in _CASTS or result is None or not is_eight_bit(result.dtype):
        return False
    sources = [t for t in map(tensor_of, node.all_input_nodes) if t is not None]
    return any(t.is_floating_point() and t.dtype.itemsize > 1 for t in sources)


def _computes(node: Node) -> bool:
    is_choice = is_part(node) or is_view(node) or packet_name(node) in _CHOOSING
    return node.op == "call_function" and not is_choice
