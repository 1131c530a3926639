"""Convolutions with kernels of one point, in channels-last: matmuls of points by channels.

A convolution is a library call to which nothing can be fused. Where matmuls are selected among
candidates on a GPU, templates compete for these too, with what follows them. The views around the
matmul move no memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.context import Context
from perfuse.graph.facts import is_same_tensor, known_tensor, tensor_of
from perfuse.graph.rewrite import NodeBuilder, replace_calls
from perfuse.selection import is_library_selected, is_selecting

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def conv_matmuls(gm: GraphModule, context: Context) -> GraphModule:
    """The pass."""
    if context.target.gpu is None or not is_selecting(context.settings):
        return gm
    # In float32 the library's convolution rounds to tf32 by default, which its matmul does not:
    # the matmul would be the slower call.
    dtypes = _HALVES if is_library_selected(context.settings) else (*_HALVES, torch.float32)
    nodes = [n for n in gm.graph.nodes if n.target is aten.convolution.default]
    found = {node: None for node in nodes if _is_pointwise(node, dtypes)}
    return replace_calls(gm, found, _as_matmul)


def _is_pointwise(node: Node, dtypes: tuple[torch.dtype, ...]) -> bool:
    """One point, every position once, and each position's channels next to each other."""
    x, weight, result = (tensor_of(n) for n in (node.args[0], node.args[1], node))
    if x is None or weight is None or result is None or x.dtype not in dtypes or node.kwargs:
        return False
    _, _, _, stride, padding, dilation, is_transposed, _, groups = node.args
    sizes = (*x.shape, *weight.shape, *x.stride(), *weight.stride())
    if not all(isinstance(size, int) for size in sizes) or 0 in (*x.shape, *weight.shape):
        return False
    is_point = x.dim() > 2 and _all(weight.shape[2:], 1)
    is_plain = _all(stride, 1) and _all(padding, 0) and _all(dilation, 1)
    is_one = is_point and is_plain and not is_transposed and groups == 1
    return bool(is_one) and _is_channels_last(x) and _is_channels_last(result)


def _all(numbers: Any, wanted: int) -> bool:
    return all(number == wanted for number in numbers)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.movedim(1, -1).is_contiguous()


def _as_matmul(conv: Node, _: None, build: NodeBuilder, copy: dict[Node, Node]) -> Node:
    """Points by channels, times channels by results; the bias is added by the same call."""
    x, weight = known_tensor(conv.args[0]), known_tensor(conv.args[1])
    results, channels, rank = int(weight.shape[0]), int(weight.shape[1]), x.dim()
    given, kernel, bias = (copy[n] if isinstance(n, Node) else None for n in conv.args[:3])
    moved = build.call(conv, aten.permute.default, given, [0, *range(2, rank), 1])
    points = build.call(conv, aten.view.default, moved, [-1, channels])
    rows = build.call(conv, aten.view.default, kernel, [results, channels])
    transposed = build.call(conv, aten.permute.default, rows, [1, 0])
    if bias is None:
        product = build.call(conv, aten.mm.default, points, transposed)
    else:
        product = build.call(conv, aten.addmm.default, bias, points, transposed)
    shaped = build.call(conv, aten.view.default, product, [x.shape[0], *x.shape[2:], results])
    result = build.call(conv, aten.permute.default, shaped, [0, rank - 1, *range(1, rank - 1)])
    assert is_same_tensor(known_tensor(conv), known_tensor(result))
    return result
