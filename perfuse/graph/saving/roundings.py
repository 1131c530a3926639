"""Values of small floats that all who read them must round alike.

A maximum, sum or mean that the backward reads is of the elements that the forward read, or that one
kernel of the backward reads: rounded ones, where they are in memory. If other kernels recompute the
elements without their roundings, the statistic is not theirs: the exponentials of a saturated
softmax are then off by the rounding of its logits.

In one graph, likewise, a mean that is rounded is near elements that are: subtracted from others, it
leaves its own rounding, which may be many times their deviation.
"""

from collections.abc import Iterable, Iterator

import torch
from torch.fx import Graph, Node

from perfuse.graph.aliases import is_view, users_through
from perfuse.graph.facts import is_part, packet_name, reached, tensor_of
from perfuse.graph.saving.costs import Work, num_elements, work_of

_SMALL = (torch.bfloat16, torch.float16)
# Ops that sum elements and round the sum. Extremes are elements.
_SUMS = frozenset(
    """_adaptive_avg_pool2d avg_pool2d avg_pool3d mean prod std std_mean sum var var_mean""".split()
)
_CASTS = frozenset({"_to_copy", "convert_element_type"})
_State = tuple[Node, bool]  # a value, and whether a statistic is taken of it on the way


def rounded_alike(known: Iterable[Node]) -> set[Node]:
    """The computed values in small floats of which statistics are taken, by loops alone.

    Statistics on the way to what the backward knows: what it is given, and what it recomputes.
    """

    def sources(state: _State) -> list[_State]:
        node, is_behind = state
        if node.op != "call_function" or work_of(node) > Work.PASS:
            return []
        is_behind = is_behind or work_of(node) == Work.PASS
        return [(source, is_behind) for source in node.all_input_nodes]

    found = reached([(node, False) for node in known], sources)
    return {node for node, is_behind in found if is_behind and _is_rounded_result(node)}


def _is_rounded_result(node: Node) -> bool:
    """Whether an op computes numbers of fewer bits than it calculates with."""
    result = tensor_of(node)
    is_small = result is not None and result.dtype in _SMALL
    return is_small and node.op == "call_function" and not is_part(node) and not is_view(node)


def read_beside_statistics(graph: Graph) -> set[Node]:
    """The computed values in small floats that are read both for a rounded statistic and without.

    Of those on one way to a statistic, the last alone.
    """
    sums = [s for node in graph.nodes if _is_read(node) for s in _sums_rounded_by(node)]

    def sources(node: Node) -> list[Node]:
        is_end = node.op != "call_function" or _is_beside(node) or work_of(node) > Work.PASS
        return [] if is_end and node not in starts else node.all_input_nodes

    starts = set(sums)
    return {node for node in reached(sums, sources) if node not in starts and _is_beside(node)}


def _sums_rounded_by(node: Node) -> Iterator[Node]:
    """The sums, if any, that this node makes a rounded statistic of: itself, or those it casts."""
    if packet_name(node) in _SUMS and any(map(_is_small, _results(node))):
        yield node
    if packet_name(node) not in _CASTS or not _is_small(tensor_of(node)):
        return

    def wide_sources(node: Node) -> list[Node]:
        return node.all_input_nodes if work_of(node) < Work.PASS else []

    for source in reached(node.all_input_nodes, wide_sources):
        summed = max(map(num_elements, source.all_input_nodes), default=0)
        if packet_name(source) in _SUMS and num_elements(node) < summed:
            yield source


def _results(node: Node) -> list[torch.Tensor | None]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (list, tuple)) else [tensor_of(node)]


def _is_small(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in _SMALL


def _is_read(node: Node) -> bool:
    return any(user.op != "output" for user in users_through(node, _is_same_memory))


def _is_beside(node: Node) -> bool:
    """Whether a computed value has several readers."""
    return _is_rounded_result(node) and len(set(users_through(node, is_view))) > 1


def _is_same_memory(node: Node) -> bool:
    return is_part(node) or is_view(node)
