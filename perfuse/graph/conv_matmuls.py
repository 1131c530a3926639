"""1x1 convolutions in channels-last: matmuls of points by channels.

A convolution is a library call to which nothing can be fused. Where matmul candidates are raced on
a GPU, templates compete for these too, with the following ops fused in. On a CPU, the library
reorders the weights of a convolution in every call, and returns new memory; a matmul reads them in
place and writes into the arena, forward and backward. The views around the matmul move no memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.context import Context
from perfuse.graph.facts import is_same_tensor, known_tensor, tensor_of
from perfuse.graph.rewrite import NodeBuilder, replace_calls, replace_parts
from perfuse.selection import is_library_selected, is_selecting

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def conv_matmuls(gm: GraphModule, context: Context) -> GraphModule:
    """The pass."""
    dtypes = _dtypes(context)
    forward = [n for n in gm.graph.nodes if n.target is aten.convolution.default]
    found = {node: None for node in forward if _is_pointwise(node, dtypes)}
    gm = replace_calls(gm, found, _as_matmul)
    if context.target.gpu is not None:
        return gm
    backward = [n for n in gm.graph.nodes if n.target is aten.convolution_backward.default]
    parted = {n for n in backward if _is_pointwise_backward(n, dtypes)}
    return replace_parts(gm, parted, _gradient)


def _dtypes(context: Context) -> tuple[torch.dtype, ...]:
    """The dtypes in which a matmul is worth trying."""
    if context.target.gpu is None:
        return (torch.float32,)
    if not is_selecting(context.settings):
        return ()
    # In float32 the library's convolution rounds to tf32 by default, which its matmul does not:
    # the matmul would be the slower call.
    return _HALVES if is_library_selected(context.settings) else (*_HALVES, torch.float32)


def _is_pointwise(node: Node, dtypes: tuple[torch.dtype, ...]) -> bool:
    """One point, every position once, and each position's channels next to each other."""
    x, weight, result = (tensor_of(n) for n in (node.args[0], node.args[1], node))
    if x is None or weight is None or result is None or node.kwargs:
        return False
    _, _, _, *rest = node.args
    return _is_plain(x, weight, rest, dtypes) and _is_channels_last(result)


def _is_pointwise_backward(node: Node, dtypes: tuple[torch.dtype, ...]) -> bool:
    """The gradient of such a convolution."""
    grad, x, weight = (tensor_of(n) for n in node.args[:3])
    if grad is None or x is None or weight is None or node.kwargs:
        return False
    _, _, _, _, *rest, _ = node.args
    return _is_plain(x, weight, rest, dtypes) and _is_channels_last(grad)


def _is_plain(
    x: torch.Tensor, weight: torch.Tensor, rest: list[Any], dtypes: tuple[torch.dtype, ...]
) -> bool:
    stride, padding, dilation, is_transposed, _, groups = rest
    if x.dtype not in dtypes or weight.dtype is not x.dtype:
        return False
    sizes = (*x.shape, *weight.shape, *x.stride(), *weight.stride())
    if not all(isinstance(size, int) for size in sizes) or 0 in (*x.shape, *weight.shape):
        return False
    is_point = x.dim() > 2 and _all(weight.shape[2:], 1)
    is_plain = _all(stride, 1) and _all(padding, 0) and _all(dilation, 1)
    is_one = is_point and is_plain and not is_transposed and groups == 1
    return bool(is_one) and _is_channels_last(x)


def _all(numbers: Any, wanted: int) -> bool:
    return all(number == wanted for number in numbers)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.movedim(1, -1).is_contiguous()


def _as_matmul(conv: Node, _: None, build: NodeBuilder, copy: dict[Node, Node]) -> Node:
    """Points by channels, times channels by results; the bias is added by the same call."""
    x, weight = known_tensor(conv.args[0]), known_tensor(conv.args[1])
    results, channels = int(weight.shape[0]), int(weight.shape[1])
    given, kernel, bias = (copy[n] if isinstance(n, Node) else None for n in conv.args[:3])
    assert given is not None and kernel is not None
    points = _points(conv, given, build)
    rows = build.call(conv, aten.view.default, kernel, [results, channels])
    transposed = build.call(conv, aten.permute.default, rows, [1, 0])
    if bias is None:
        product = build.call(conv, aten.mm.default, points, transposed)
    else:
        product = build.call(conv, aten.addmm.default, bias, points, transposed)
    result = _image(conv, product, x, build)
    assert is_same_tensor(known_tensor(conv), known_tensor(result))
    return result


def _points(like: Node, image: Node, build: NodeBuilder) -> Node:
    """A channels-last image as a matrix of points by channels."""
    rank = known_tensor(image).dim()
    moved = build.call(like, aten.permute.default, image, [0, *range(2, rank), 1])
    return build.call(like, aten.view.default, moved, [-1, known_tensor(image).shape[1]])


def _image(like: Node, points: Node, sizes_of: torch.Tensor, build: NodeBuilder) -> Node:
    """A matrix of points by channels as a channels-last image with the points of another."""
    rank, channels = sizes_of.dim(), known_tensor(points).shape[1]
    sizes = [sizes_of.shape[0], *sizes_of.shape[2:], channels]
    shaped = build.call(like, aten.view.default, points, sizes)
    return build.call(like, aten.permute.default, shaped, [0, rank - 1, *range(1, rank - 1)])


# -- gradients -----------------------------------------------------------------------------------


def _gradient(part: Node, call: Node, build: NodeBuilder, copy: dict[Node, Node]) -> Node:
    """The gradient of the input, of the weight or of the bias."""
    grad, x, weight = (copy[n] for n in call.args[:3] if isinstance(n, Node))
    kernel = known_tensor(weight)
    results, channels = int(kernel.shape[0]), int(kernel.shape[1])
    points = _points(part, grad, build)
    if part.args[1] == 0:
        rows = build.call(part, aten.view.default, weight, [results, channels])
        made = _image(part, build.call(part, aten.mm.default, points, rows), known_tensor(x), build)
    elif part.args[1] == 1:
        transposed = build.call(part, aten.permute.default, points, [1, 0])
        product = build.call(part, aten.mm.default, transposed, _points(part, x, build))
        made = build.call(part, aten.view.default, product, list(kernel.shape))
    else:
        made = build.call(part, aten.sum.dim_IntList, points, [0])
    return made
