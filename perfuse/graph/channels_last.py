"""Convolutional networks: channels-last between their convolutions.

On a CPU, the library's depthwise and 1x1 convolutions are faster on channels-last operands, and the
loops between convolutions vectorise over channels, which are many, instead of pixels, which may be
fewer than a vector has lanes. So where most convolutions of a graph are of these kinds, every
convolution that profits reads a channels-last operand. In other graphs only 1x1 convolutions of few
pixels do.

On a GPU, matrix units read halves channels-last: of other operands the library transposes a copy,
and the result back, around each convolution. Depthwise convolutions have faster kernels there too.
Ones of several groups do not. ResNet-50's inference over 32 images takes 2.46 ms of an H200 as it
is written, and 1.69 channels-last, ConvNeXt's 2.51 and 2.35, a UNet's with group norms 3.74 and
6.19 (bfloat16, medians of one run each).

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
from perfuse.graph.facts import is_same_size, known_tensor, packet_name, tensor_of
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
_MOST_OTHERS_ON_GPU = 0.25
_STATISTICS = frozenset({"mean", "sum", "var", "var_mean"})
_CASTS = frozenset({"_to_copy", "convert_element_type"})
_HALVES = (torch.float16, torch.bfloat16)


def lay_joint_channels_last(gm: GraphModule, context: Context) -> GraphModule:
    """The pass over a joint graph: it decides for both halves.

    On a GPU it keeps the layouts: statistics of batches reduce contiguous pixels faster.
    """
    if context.target.gpu is None:
        gm = _laid_out(gm, context)
    for node in _convolutions(gm):
        node.meta[DECIDED] = True
    return gm


def lay_channels_last(gm: GraphModule, context: Context) -> GraphModule:
    """The pass over an inference graph."""
    return gm if is_decided(gm) else _laid_out(gm, context)


def is_decided(gm: GraphModule) -> bool:
    """Whether layouts were decided on the joint graph that this is a half of."""
    return any(DECIDED in node.meta for node in _convolutions(gm))


def _laid_out(gm: GraphModule, context: Context) -> GraphModule:
    choose = _chosen_on_cpu if context.target.gpu is None else _chosen_on_gpu
    chosen = choose(gm, _convolutions(gm))
    is_gpu = context.target.gpu is not None
    return copy_but_for(gm, _Layouts(chosen, is_gpu).make) if chosen else gm


def _chosen_on_cpu(gm: GraphModule, nodes: list[Node]) -> set[Node]:
    frozen = frozen_nodes(gm)
    forward = [n for n in nodes if n.target is aten.convolution.default]
    chosen = {n for n in nodes if _gains(n, frozen)}
    num_thin = sum(_is_thin(n) or n.args[1] in frozen for n in forward)
    if len(forward) < _FEWEST_CONVOLUTIONS or 2 * num_thin <= len(forward):
        return {n for n in chosen if _is_narrow_matmul(n)}
    return chosen


def _chosen_on_gpu(gm: GraphModule, nodes: list[Node]) -> set[Node]:
    """All that gain, where they are most: each of the others costs two transpositions.

    Statistics of groups of channels, which lie in pieces then, cost more than convolutions gain.
    """
    chosen = {n for n in nodes if _gains_on_gpu(n)}
    forward = [n for n in nodes if n.target is aten.convolution.default]
    num_chosen = sum(n in chosen for n in forward)
    num_others = len(forward) - num_chosen + sum(map(_reduces_groups, gm.graph.nodes))
    is_most = num_others <= _MOST_OTHERS_ON_GPU * len(forward)
    return chosen if num_chosen >= _FEWEST_CONVOLUTIONS and is_most else set()


def _reduces_groups(node: Node) -> bool:
    """Whether it takes statistics of an image's channels group by group."""
    if packet_name(node) not in _STATISTICS:
        return False
    source = node.all_input_nodes[0]
    while packet_name(source) in _CASTS:
        source = source.all_input_nodes[0]
    groups, image = tensor_of(source), None
    if packet_name(source) in ("view", "_unsafe_view"):
        image = tensor_of(source.all_input_nodes[0])
    if groups is None or image is None or image.dim() != 4 or groups.dim() < 3:
        return False
    is_by_image = is_same_size(image.shape[0], groups.shape[0])
    return is_by_image and not is_same_size(image.shape[1], groups.shape[1])


def _gains_on_gpu(node: Node) -> bool:
    """Whether it is a plain convolution of halves in a plane, of one group or depthwise."""
    given, weight, (_, _, _, is_transposed, _, groups, *_) = _operands(node)
    x, kernel = tensor_of(given), tensor_of(weight)
    if x is None or kernel is None or x.dim() != 4 or node.kwargs or is_transposed:
        return False
    if x.dtype not in _HALVES or kernel.dtype is not x.dtype:
        return False
    if not all(isinstance(n, int) and n > 0 for n in (*x.shape, *kernel.shape, *x.stride())):
        return False
    return bool(groups == 1 or kernel.shape[1] == 1)


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

    def __init__(self, chosen: set[Node], is_gpu: bool) -> None:
        super().__init__()
        self._chosen = chosen
        self._is_gpu = is_gpu

    def make(self, node: Node, new: GraphCopy) -> Node:
        if node.target not in _CONVOLUTIONS:
            return super().make(node, new)
        build = NodeBuilder(new.graph)
        if node not in self._chosen:
            return self.as_traced(node, new, build)
        num_images = 1 if node.target is aten.convolution.default else 2
        args: list[Any] = list(map_arg(node.args, new.of.__getitem__))
        args[:num_images] = [_channels_last(a, build) for a in args[:num_images]]
        if not self._is_gpu:
            return build.call(node, node.target, *args)
        # PyTorch does not trace the call for a GPU that is not here.
        made = build.opaque(node, node.target, *args)
        made.meta["val"] = known_tensor(node).contiguous(memory_format=LAST)
        return made


def _channels_last(node: Node, build: NodeBuilder) -> Node:
    if node.meta["val"].is_contiguous(memory_format=LAST):
        return node
    return build.call(node, aten.clone.default, node, memory_format=LAST)
