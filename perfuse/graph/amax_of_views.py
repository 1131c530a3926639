"""The largest magnitude of a view is that of the tensor, so that equal scales are found equal.

A float8 linear layer flattens its input for the gradient of the weight, and takes the maximum of
the flattened tensor there and of the tensor itself in the forward. As one value it is reduced once,
and the backward gets a scale instead of a second maximum.
"""

import torch
from torch.fx import GraphModule, Node

from perfuse.graph.facts import WHOLE_VIEWS, packet_name, tensor_of
from perfuse.graph.rewrite import NodeBuilder, Rule, index_rules, rewrite

aten = torch.ops.aten


def amax_of_tensor(node: Node, build: NodeBuilder) -> Node | None:
    magnitude = node.args[0]
    if node.target != aten.max.default or not isinstance(magnitude, Node):
        return None
    if packet_name(magnitude) != "abs":
        return None
    source = given = magnitude.args[0]
    while isinstance(source, Node) and packet_name(source) in WHOLE_VIEWS:
        source = source.args[0]
    if source is given:
        return None
    return build.call(node, aten.max.default, build.call(node, aten.abs.default, source))


_INDEXED = index_rules((Rule("max(abs(view(x))) -> max(abs(x))", ("max",), amax_of_tensor),))


def amax_of_views(gm: GraphModule) -> GraphModule:
    """The pass on joint graphs; those without FP8 values are left unchanged."""
    return rewrite(gm, _INDEXED) if any(map(_is_float8, gm.graph.nodes)) else gm


def _is_float8(node: Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.is_floating_point() and tensor.element_size() == 1
