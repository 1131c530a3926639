"""Convolutions of the CPU's library with frozen weights: in the library's own layout.

The library reorders the weight of a convolution in every call, which takes longer than the
convolution where images are small. A frozen weight is reordered when it is prepared. Activations
stay with our loops: those of the library turn NaN into a number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.context import Context
from perfuse.graph.facts import known_tensor, tensor_of
from perfuse.graph.frozen import frozen_nodes
from perfuse.graph.rewrite import NodeBuilder, replace_calls
from perfuse.torch_compat.ops import packed_convolution_ops

aten = torch.ops.aten
LAST = torch.channels_last


def pack_convolutions(gm: GraphModule, context: Context) -> GraphModule:
    """The pass: nothing where no input is frozen, or on a GPU."""
    frozen = frozen_nodes(gm) if context.target.gpu is None else set()
    if not frozen or packed_convolution_ops() is None:
        return gm
    convolutions = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    found = {node: None for node in convolutions if can_pack(node, frozen)}
    return replace_calls(gm, found, _packed)


def can_pack(node: Node, frozen: set[Node]) -> bool:
    """Whether the library computes this convolution, from channels-last images."""
    given, weight, bias, _, _, _, is_transposed, _, groups = node.args
    x, kernel, result = tensor_of(given), tensor_of(weight), tensor_of(node)
    if x is None or kernel is None or result is None or node.kwargs or is_transposed:
        return False
    if weight not in frozen or not (bias is None or bias in frozen):
        return False
    if not x.dtype is kernel.dtype is torch.float32 or x.dim() != 4:
        return False
    if not all(isinstance(n, int) and n > 0 for n in (*x.shape, *kernel.shape, *result.shape)):
        return False
    is_depthwise = kernel.shape[1] == 1 and groups != 1  # loops of ours, which fuse
    return not is_depthwise and result.is_contiguous(memory_format=LAST)


def _packed(conv: Node, _: None, build: NodeBuilder, copy: dict[Node, Node]) -> Node:
    ops = packed_convolution_ops()
    assert ops is not None
    stride, padding, dilation = conv.args[3:6]
    geometry = (padding, stride, dilation, conv.args[8])
    given, weight, bias = (copy[n] if isinstance(n, Node) else None for n in conv.args[:3])
    assert given is not None and weight is not None
    size = list(known_tensor(given).shape)
    own = build.opaque(weight, ops.reorder, weight, *geometry, size)
    activation: tuple[Any, ...] = ("none", [], "")
    return build.call(conv, ops.pointwise, given, own, bias, *geometry, *activation)
