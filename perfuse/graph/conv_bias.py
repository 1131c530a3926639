"""Biases of convolutions on a GPU: sums of their own, which fuse with what is around them.

The library's convolutions take no bias: PyTorch adds it in a kernel that reads and writes the whole
result, and sums its gradient in another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from perfuse.context import Context
from perfuse.graph.copying import GraphCopy, copy_but_for
from perfuse.graph.facts import is_part, is_same_tensor, known_tensor
from perfuse.graph.rewrite import NodeBuilder

aten = torch.ops.aten
# Arguments of the calls.
_BIAS = 2
_BIAS_SIZES, _MASK = 3, 10


def split_conv_biases(gm: GraphModule, context: Context) -> GraphModule:
    """The pass, over joint graphs and inference graphs."""
    if context.target.gpu is None:
        return gm
    found = {node for node in gm.graph.nodes if _adds_bias(node) or _sums_bias(node)}
    return copy_but_for(gm, _Split(found).make) if found else gm


def _adds_bias(node: Node) -> bool:
    is_forward = node.target is aten.convolution.default and not node.kwargs
    return is_forward and isinstance(node.args[_BIAS], Node)


def _sums_bias(node: Node) -> bool:
    """Whether it is a backward that returns the gradient of a bias, and is read by its parts."""
    if node.target is not aten.convolution_backward.default or node.kwargs:
        return False
    mask: Any = node.args[_MASK]
    return bool(mask[2]) and all(map(is_part, node.users))


class _Split:
    """Copies nodes, with these calls in two."""

    def __init__(self, found: set[Node]) -> None:
        self._found = found

    def make(self, node: Node, new: GraphCopy) -> Node:
        build = NodeBuilder(new.graph)
        if node in self._found:
            return self._call(node, new, build)
        call = node.args[0] if is_part(node) else None
        if isinstance(call, Node) and call in self._found and node.args[1] == 2:
            gradient = new.of[call.all_input_nodes[0]]
            others = [d for d in range(known_tensor(gradient).dim()) if d != 1]
            return build.call(node, aten.sum.dim_IntList, gradient, others)
        return new.copy(node)

    def _call(self, node: Node, new: GraphCopy, build: NodeBuilder) -> Node:
        args: list[Any] = list(map_arg(node.args, new.of.__getitem__))
        # Its results are known: PyTorch does not trace the call for a GPU that is not here.
        if node.target is aten.convolution_backward.default:
            args[_BIAS_SIZES], args[_MASK] = None, [*args[_MASK][:2], False]
            made = build.opaque(node, node.target, *args)
            made.meta["val"] = (*node.meta["val"][:2], None)
            return made
        bias, args[_BIAS] = args[_BIAS], None
        made = build.opaque(node, node.target, *args)
        channels = [-1, *[1] * (known_tensor(made).dim() - 2)]
        column = build.call(node, aten.view.default, bias, channels)
        summed = build.call(node, aten.add.Tensor, made, column)
        return (
            summed if is_same_tensor(known_tensor(node), known_tensor(summed)) else new.copy(node)
        )
