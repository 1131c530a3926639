"""Convolutions over non-overlapping patches, on a CPU: matmuls of patches by points.

Their stride is the size of their kernel and there is no padding: each position of the image is in
one patch, so that a matmul reads a copy of the image in another order, forward and backward. The
library reorders the weights in every call, and they are large compared with an image of few
patches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.context import Context
from perfuse.graph.facts import known_tensor, tensor_of
from perfuse.graph.relayout import with_strides
from perfuse.graph.rewrite import NodeBuilder, replace_calls, replace_parts
from perfuse.torch_compat.ops import OpOverload

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default


def patch_matmuls(gm: GraphModule, context: Context) -> GraphModule:
    """The pass."""
    if context.target.gpu is not None:
        return gm
    gm = replace_calls(gm, dict.fromkeys(_found(gm, _FORWARD)), _product)
    return replace_parts(gm, _found(gm, _BACKWARD), _gradient)


def _found(gm: GraphModule, target: OpOverload) -> list[Node]:
    calls = gm.graph.find_nodes(op="call_function", target=target)
    return [node for node in calls if _has_separate_patches(node)]


def _has_separate_patches(node: Node) -> bool:
    args: tuple[Any, ...] = node.args if node.target is _FORWARD else node.args[1:]
    image, kernel = tensor_of(args[0]), tensor_of(args[1])
    if image is None or kernel is None or node.kwargs or image.dim() != 4:
        return False
    if not all(isinstance(n, int) and n > 0 for n in (*image.shape, *kernel.shape)):
        return False
    stride, padding, dilation, is_transposed, _, groups = args[3:9]
    points = list(kernel.shape[2:])
    is_plain = not is_transposed and groups == 1 and not any(padding)
    is_apart = list(stride) == points != [1, 1]
    is_whole = not any(n % p for n, p in zip(image.shape[2:], points, strict=True))
    is_next = all(d == 1 for d in dilation)
    is_float = {image.dtype, kernel.dtype} == {torch.float32} and kernel.is_contiguous()
    return bool(is_plain and is_apart and is_whole and is_next and is_float)


def _product(conv: Node, _: None, build: NodeBuilder, copy: dict[Node, Node]) -> Node:
    image, kernel, bias = (copy[n] if isinstance(n, Node) else None for n in conv.args[:3])
    assert image is not None and kernel is not None
    transposed = build.call(conv, aten.permute.default, _rows(conv, kernel, build), [1, 0])
    patches = _patches(conv, (image, kernel), build)
    if bias is None:
        product = build.call(conv, aten.mm.default, patches, transposed)
    else:
        product = build.call(conv, aten.addmm.default, bias, patches, transposed)
    batch, channels, tall, wide = known_tensor(conv).shape
    shaped = build.call(conv, aten.view.default, product, [batch, tall, wide, channels])
    result = build.call(conv, aten.permute.default, shaped, [0, 3, 1, 2])
    return _laid_as(conv, result, build)


def _gradient(part: Node, call: Node, build: NodeBuilder, copy: dict[Node, Node]) -> Node:
    """The gradient of the input, of the weight or of the bias."""
    grad, image, kernel = (copy[n] for n in call.args[:3] if isinstance(n, Node))
    if part.args[1] == 2:
        return build.call(part, aten.sum.dim_IntList, grad, [0, 2, 3])
    moved = build.call(part, aten.permute.default, grad, [0, 2, 3, 1])
    laid = build.call(part, aten.clone.default, moved, memory_format=torch.contiguous_format)
    channels = int(known_tensor(grad).shape[1])
    points = build.call(part, aten.view.default, laid, [-1, channels])
    if part.args[1] == 1:
        transposed = build.call(part, aten.permute.default, points, [1, 0])
        patches = _patches(part, (image, kernel), build)
        product = build.call(part, aten.mm.default, transposed, patches)
        shape = list(known_tensor(kernel).shape)
        return _laid_as(part, build.call(part, aten.view.default, product, shape), build)
    product = build.call(part, aten.mm.default, points, _rows(part, kernel, build))
    sizes = known_tensor(image).shape
    batch, deep, *_ = sizes
    tall, wide = known_tensor(kernel).shape[2:]
    split = [batch, sizes[2] // tall, sizes[3] // wide, deep, tall, wide]
    apart = build.call(part, aten.view.default, product, split)
    back = build.call(part, aten.permute.default, apart, [0, 3, 1, 4, 2, 5])
    whole = build.call(part, aten.clone.default, back, memory_format=torch.contiguous_format)
    return _laid_as(part, build.call(part, aten.view.default, whole, list(sizes)), build)


def _rows(like: Node, kernel: Node, build: NodeBuilder) -> Node:
    """The weight as a matrix of results by points."""
    return build.call(like, aten.view.default, kernel, [known_tensor(kernel).shape[0], -1])


def _patches(like: Node, operands: tuple[Node, Node], build: NodeBuilder) -> Node:
    """The image as a matrix of patches by points."""
    image, kernel = operands
    batch, channels, height, width = known_tensor(image).shape
    tall, wide = known_tensor(kernel).shape[2:]
    split = [batch, channels, height // tall, tall, width // wide, wide]
    apart = build.call(like, aten.reshape.default, image, split)
    moved = build.call(like, aten.permute.default, apart, [0, 2, 4, 1, 3, 5])
    laid = build.call(like, aten.clone.default, moved, memory_format=torch.contiguous_format)
    return build.call(like, aten.view.default, laid, [-1, channels * tall * wide])


def _laid_as(like: Node, made: Node, build: NodeBuilder) -> Node:
    """The result with the layout that was traced."""
    wanted = known_tensor(like)
    if wanted.stride() == known_tensor(made).stride():
        return made
    return with_strides(made, wanted, build)
