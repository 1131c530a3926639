"""Casts of inputs that a library call reads in the forward and another one in the backward.

Such a cast is in memory in both halves. Recomputed, it would be a kernel of its own in the backward
that reads every weight again; saved, it is the memory that eager keeps as well.
"""

from collections.abc import Iterator

from torch.fx import Graph, Node

from perfuse.graph.aliases import is_view
from perfuse.graph.facts import packet_name, tensor_of
from perfuse.graph.saving.costs import Work, work_of
from perfuse.graph.saving.roles import Roles


def casts_for_both_halves(graph: Graph, roles: Roles) -> frozenset[Node]:
    """The casts of inputs to a smaller type that library calls of both halves read."""
    casts = (n for n in graph.nodes if n in roles.forward and _is_narrowing(n))
    return frozenset(n for n in casts if _is_read_by_libraries(n, roles))


def _is_narrowing(node: Node) -> bool:
    if packet_name(node) != "_to_copy" or not isinstance(node.args[0], Node):
        return False
    cast, source = tensor_of(node), tensor_of(node.args[0])
    if cast is None or source is None or not cast.is_floating_point():
        return False
    return cast.itemsize < source.itemsize and _origin(node.args[0]).op == "placeholder"


def _origin(node: Node) -> Node:
    """The value that owns the memory of a view."""
    while is_view(node) and node.op == "call_function":
        node = node.all_input_nodes[0]
    return node


def _is_read_by_libraries(node: Node, roles: Roles) -> bool:
    readers = [n for n in _readers(node) if work_of(n) is Work.PRODUCT]
    return any(n in roles.forward for n in readers) and any(n in roles.backward for n in readers)


def _readers(node: Node) -> Iterator[Node]:
    """The nodes that read a value, or a view of it."""
    for user in node.users:
        if user.op == "call_function" and is_view(user):
            yield from _readers(user)
        elif user.op == "call_function":
            yield user
