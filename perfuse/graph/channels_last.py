"""Convolutional networks on a CPU: channels-last between their convolutions.

The library's depthwise and 1x1 convolutions are faster on channels-last operands, and the loops
between convolutions vectorise over channels, which are many, instead of pixels, which may be fewer
than a vector has lanes. So where most convolutions of a graph are of these kinds, every convolution
that profits reads a channels-last operand. In other graphs only 1x1 convolutions of few pixels do.
Ops that work on any layout pass it on; what other ops read, and what the graph returns, has the
strides that were traced.

In training this is decided on the joint graph, so that both halves have the same layouts and what
is saved is not transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from perfuse.context import Context
from perfuse.graph.copying import GraphCopy, copy_but_for
from perfuse.graph.facts import known_tensor, tensor_of
from perfuse.graph.frozen import frozen_nodes
from perfuse.graph.relayout import Relayout
from perfuse.graph.rewrite import NodeBuilder
from perfuse.torch_compat.ops import OpOverload

aten = torch.ops.aten
LAST = torch.channels_last

# The mark of convolutions whose layouts are decided.
DECIDED = "perfuse_layout_decided"

_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
# A convolution of several points and all channels on fewer pixels than this stays contiguous: of
# (4, 512, 2, 2) with 3x3 points it takes 8.1 ms channels-last and 3.1 contiguous (one Zen 3 core),
# of (4, 128, 8, 8) still 1.20 and 1.07.
_FEWEST_PIXELS = 128
# A 1x1 convolution is a matmul per contiguous image, as narrow as the image has pixels, and one for
# all images channels-last. Of (4, 256, p, p) to 1024 channels with gradients: 1.85 ms and 0.30 with
# p = 2, 2.30 and 1.53 with 5, 2.55 and 2.26 with 6, 3.81 and 4.22 with 8 (one Zen 5 core,
# transpositions included).
_MOST_PIXELS_OF_A_POINT = 36
# In shorter chains, the two transpositions at the borders cost more than the convolutions gain.
_FEWEST_CONVOLUTIONS = 3


def lay_joint_channels_last(gm: GraphModule, context: Context) -> GraphModule:
    """The pass over a joint graph: it decides for both halves."""
    if context.target.gpu is not None:
        return gm
    gm = _laid_out(gm)
    for node in _convolutions(gm):
        node.meta[DECIDED] = True
    return gm


def lay_channels_last(gm: GraphModule, context: Context) -> GraphModule:
    """The pass over an inference graph."""
    return gm if context.target.gpu is not None or is_decided(gm) else _laid_out(gm)


def is_decided(gm: GraphModule) -> bool:
    """Whether layouts were decided on the joint graph that this is a half of."""
    return any(DECIDED in node.meta for node in _convolutions(gm))


def _laid_out(gm: GraphModule) -> GraphModule:
    nodes = _convolutions(gm)
    frozen = frozen_nodes(gm)
    forward = [n for n in nodes if n.target is aten.convolution.default]
    chosen = {n for n in nodes if _gains(n, frozen)}
    num_thin = sum(_is_thin(n) or n.args[1] in frozen for n in forward)
    if len(forward) < _FEWEST_CONVOLUTIONS or 2 * num_thin <= len(forward):
        chosen = {n for n in chosen if _is_narrow_matmul(n)}
    return copy_but_for(gm, _Layouts(chosen).make) if chosen else gm


def _convolutions(gm: GraphModule) -> list[Node]:
    return [n for target in _CONVOLUTIONS for n in _calls(gm, target)]


def _calls(gm: GraphModule, target: OpOverload) -> Sequence[Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def _operands(node: Node) -> tuple[Any, Any, Sequence[Any]]:
    """Input, weight and the arguments after the bias (or the sizes of its gradient)."""
    args: Sequence[Any] = node.args if node.target is aten.convolution.default else node.args[1:]
    return args[0], args[1], args[3:]


def _is_thin(node: Node) -> bool:
    """Whether it is 1x1, or depthwise."""
    _, weight, _ = _operands(node)
    shape: Sequence[Any] = known_tensor(weight).shape
    is_plane = len(shape) == 4 and all(isinstance(n, int) for n in shape)
    return is_plane and (shape[1] == 1 or (shape[2] == 1 and shape[3] == 1))


def _gains(node: Node, frozen: set[Node]) -> bool:
    given, weight, rest = _operands(node)
    x, kernel = tensor_of(given), tensor_of(weight)
    if x is None or kernel is None or x.dim() != 4 or node.kwargs or rest[3]:
        return False
    if x.dtype is not torch.float32 or kernel.dtype is not torch.float32:
        return False
    if not all(isinstance(n, int) and n > 0 for n in (*x.shape, *kernel.shape, *x.stride())):
        return False
    if weight in frozen:  # it is packed, after which results are channels-last in any case
        return True
    return _is_thin(node) or x.shape[2] * x.shape[3] >= _FEWEST_PIXELS


def _is_narrow_matmul(node: Node) -> bool:
    """Whether it is 1x1, of every position once, on images of few pixels."""
    given, weight, (stride, padding, _, _, _, groups, *_) = _operands(node)
    *_, height, width = known_tensor(given).shape
    is_point = tuple(known_tensor(weight).shape[2:]) == (1, 1) and groups == 1
    is_plain = all(n == 1 for n in stride) and not any(padding)
    return is_point and is_plain and 1 < height * width <= _MOST_PIXELS_OF_A_POINT


class _Layouts(Relayout):
    """Gives the chosen convolutions channels-last operands."""

    def __init__(self, chosen: set[Node]) -> None:
        super().__init__()
        self._chosen = chosen

    def make(self, node: Node, new: GraphCopy) -> Node:
        if node.target not in _CONVOLUTIONS:
            return super().make(node, new)
        build = NodeBuilder(new.graph)
        if node not in self._chosen:
            return self.as_traced(node, new, build)
        num_images = 1 if node.target is aten.convolution.default else 2
        args: list[Any] = list(map_arg(node.args, new.of.__getitem__))
        args[:num_images] = [_channels_last(a, build) for a in args[:num_images]]
        return build.call(node, node.target, *args)


def _channels_last(node: Node, build: NodeBuilder) -> Node:
    if node.meta["val"].is_contiguous(memory_format=LAST):
        return node
    return build.call(node, aten.clone.default, node, memory_format=LAST)
