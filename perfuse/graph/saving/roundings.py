"""Values of small floats that both halves of a training step must round alike.

A maximum, sum or mean that the backward reads is of the elements that the forward read, or that one
kernel of the backward reads: rounded ones, where they are in memory. If other kernels recompute the
elements without their roundings, the statistic is not theirs: the exponentials of a saturated
softmax are then off by the rounding of its logits.
"""

from collections.abc import Iterable

import torch
from torch.fx import Node

from perfuse.graph.aliases import is_view
from perfuse.graph.facts import is_part, reached, tensor_of
from perfuse.graph.saving.costs import Work, work_of

_SMALL = (torch.bfloat16, torch.float16)
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
