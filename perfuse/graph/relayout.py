"""Graphs with other strides inside: what the passes that change layouts have in common.

Ops that work on any layout propagate a new one. What other ops read, and what the graph returns,
has the strides that were traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from perfuse.graph.copying import GraphCopy
from perfuse.graph.facts import has_effects, is_part, is_random, packet_name
from perfuse.graph.rewrite import NodeBuilder
from perfuse.torch_compat.ops import OpOverload

aten = torch.ops.aten

# Besides pointwise ops: each is lowered to loops over any layout, and its result is not a view.
_ANY_LAYOUT = frozenset(
    """_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _to_copy amax amin avg_pool2d
    avg_pool2d_backward cat clone constant_pad_nd max_pool2d_with_indices
    max_pool2d_with_indices_backward mean sum upsample_nearest2d upsample_nearest2d_backward var
    var_mean""".split()
)


class Relayout:
    """Copies nodes into a graph whose values may have other strides."""

    def __init__(self) -> None:
        self.restored: dict[Node, Node] = {}  # old node -> its value with the strides traced

    def make(self, node: Node, new: GraphCopy) -> Node:
        """The copy of a node, by what its arguments have become."""
        build = NodeBuilder(new.graph)
        if not any(self._is_moved(n, new) for n in node.all_input_nodes):
            return new.copy(node)
        if is_part(node):
            made, at = new.copy(node), node.args[1]
            (whole,) = made.all_input_nodes
            made.meta["val"] = whole.meta["val"][at]
            return made
        if is_any_layout(node):
            args, kwargs = map_arg((node.args, node.kwargs), new.of.__getitem__)
            return build.call(node, node.target, *args, **kwargs)
        return self.as_traced(node, new, build)

    def as_traced(self, node: Node, new: GraphCopy, build: NodeBuilder) -> Node:
        """A copy that reads what was traced, whatever layout its arguments have by now."""
        made = new.copy(node)
        read = {new.of[n]: n for n in node.all_input_nodes if self._is_moved(n, new)}
        if not read:
            return made
        with new.graph.inserting_before(made):
            for copied, old in read.items():
                if old not in self.restored:
                    self.restored[old] = with_strides(copied, old.meta["val"], build)
                made.replace_input_with(copied, self.restored[old])
        return made

    def _is_moved(self, node: Node, new: GraphCopy) -> bool:
        return bool(_strides(node.meta.get("val")) != _strides(new.of[node].meta.get("val")))


def is_any_layout(node: Node) -> bool:
    """Whether the op computes the same from operands of any strides."""
    if not isinstance(node.target, OpOverload) or has_effects(node) or is_random(node):
        return False
    return torch.Tag.pointwise in node.target.tags or packet_name(node) in _ANY_LAYOUT


def _strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.stride())
    return [_strides(v) for v in value] if isinstance(value, (list, tuple)) else None


def with_strides(node: Node, wanted: torch.Tensor, build: NodeBuilder) -> Node:
    """The value with the strides of `wanted`, which cover memory once: a copy, or a view."""
    strides, shape = tuple(wanted.stride()), tuple(wanted.shape)
    if _differ_at_ones(node.meta["val"], wanted):
        sizes = [n for n in shape if n != 1]
        flat = build.call(node, aten.view.default, node, sizes)
        viewed = build.call(node, aten.view.default, flat, list(shape))
        if tuple(viewed.meta["val"].stride()) == strides:
            return viewed
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], shape[d] == 1))
    if order == list(range(len(shape))):
        return build.call(node, aten.clone.default, node, memory_format=torch.contiguous_format)
    given = build.call(node, aten.permute.default, node, order)
    laid = build.call(node, aten.clone.default, given, memory_format=torch.contiguous_format)
    back = [order.index(d) for d in range(len(shape))]
    return build.call(node, aten.permute.default, laid, back)


def _differ_at_ones(given: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether the same memory would do: the strides differ where there is no step to make."""
    if not all(isinstance(n, int) for n in wanted.shape):
        return False
    triples = zip(wanted.shape, given.stride(), wanted.stride(), strict=True)
    return all(n == 1 or a == b for n, a, b in triples)
