"""FlexAttention block masks without the lists that no kernel reads.

A block mask has, for each block of queries, the list of its blocks of keys, and for each block of
keys that of its blocks of queries, which only the backward needs. Attention without a mask has one
block of everything, for which the program sorts lists of one element.
"""

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from perfuse.graph.copying import GraphCopy, copy_but_for
from perfuse.graph.dead_code import eliminate_dead_code

# By name: the position of the block mask among the arguments.
_MASKS = {"flex_attention": 4, "flex_attention_backward": 9}
# Positions in a block mask: the lists of blocks of keys, and those of blocks of queries.
_KEYS, _QUERIES = slice(2, 6), slice(6, 10)


def drop_unread_lists(gm: GraphModule) -> GraphModule:
    """The pass."""
    found = {node: args for node in gm.graph.nodes if (args := _changed(node)) is not None}
    if not found:
        return gm

    def make(node: Node, new: GraphCopy) -> Node | None:
        if node not in found:
            return new.copy(node)
        made = new.graph.create_node(
            node.op, node.target, _mapped(found[node], new), {}, node.name, node.type
        )
        made.meta = node.meta.copy()
        return made

    return eliminate_dead_code(copy_but_for(gm, make))


def _changed(node: Node) -> tuple[Any, ...] | None:
    """The arguments of a call with a smaller block mask; None where nothing changes."""
    name = str(node.target) if node.op == "call_function" else ""
    position = _MASKS.get(name)
    if position is None or len(node.args) <= position or node.kwargs:
        return None
    mask: Any = node.args[position]
    keys, queries = mask[_KEYS], mask[_QUERIES]
    if name == "flex_attention":
        kept: Sequence[Any] = (None,) * len(queries)
    else:
        kept = keys if _is_one_block(*keys[:2]) and _is_one_block(*queries[:2]) else queries
    if tuple(kept) == tuple(queries):
        return None
    smaller = (*mask[: _QUERIES.start], *kept, *mask[_QUERIES.stop :])
    return (*node.args[:position], smaller, *node.args[position + 1 :])


def _is_one_block(counts: Any, indices: Any) -> bool:
    """Whether all queries and all keys are one block: the lists of both sides are equal then."""
    if not isinstance(counts, Node) or not isinstance(indices, Node):
        return False
    shapes = [node.meta["val"].shape for node in (counts, indices)]
    return shapes[0][-1] == 1 and tuple(shapes[1][-2:]) == (1, 1)


def _mapped(value: Any, new: GraphCopy) -> Any:
    if isinstance(value, Node):
        return new.of[value]
    if isinstance(value, tuple | list):
        return type(value)(_mapped(item, new) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, new) for name, item in value.items()}
    return value
