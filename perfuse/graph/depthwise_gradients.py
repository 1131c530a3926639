"""Gradients of large depthwise convolutions on a CPU, in channels-last, part by part.

The library takes ten times as long for them as for the convolution (of (4, 96, 16, 16) with 7x7
points 1.9 ms and 0.15, on one Zen 4 core). The gradient of the input is a convolution of its own,
with the points in reverse order; that of the weight is a loop (lower/families/depthwise.py).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.context import Context
from perfuse.graph.facts import known_tensor, tensor_of
from perfuse.graph.rewrite import NodeBuilder, replace_parts

aten = torch.ops.aten
LAST = torch.channels_last
# Below, both gradients are loops of their own.
_FEW_POINTS = 25


def split_depthwise_gradients(gm: GraphModule, context: Context) -> GraphModule:
    """The pass."""
    calls = gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten.convolution_backward.default
    )
    found = {node for node in calls if _is_large_depthwise(node)}
    return gm if context.target.gpu is not None else replace_parts(gm, found, _part)


def _is_large_depthwise(node: Node) -> bool:
    grad, x, weight = (tensor_of(n) for n in node.args[:3])
    if grad is None or x is None or weight is None or node.kwargs:
        return False
    rest: tuple[Any, ...] = node.args[4:]
    stride, _, _, is_transposed, _, groups, _ = rest
    sizes: tuple[Any, ...] = (*x.shape, *weight.shape, *x.stride(), *grad.stride())
    if x.dim() != 4 or not all(isinstance(n, int) and n > 0 for n in sizes):
        return False
    is_depthwise = groups == x.shape[1] == weight.shape[0] and groups > 1 and not is_transposed
    num_points = int(weight.shape[2]) * int(weight.shape[3])
    is_large = num_points > _FEW_POINTS and _all_one(stride)
    is_last = all(t.is_contiguous(memory_format=LAST) for t in (x, grad))
    dtypes = {t.dtype for t in (grad, x, weight)}
    return bool(is_depthwise) and is_large and is_last and dtypes == {torch.float32}


def _all_one(numbers: Any) -> bool:
    return all(number == 1 for number in numbers)


def _part(part: Node, call: Node, build: NodeBuilder, copy: dict[Node, Node]) -> Node:
    """The gradient of the input, of the weight or of the bias."""
    grad, x, weight = (copy[n] for n in call.args[:3] if isinstance(n, Node))
    _, _, _, *rest, _ = call.args
    if part.args[1] == 0:
        return _input_gradient(part, (grad, weight), rest[1:], build)
    if part.args[1] == 2:
        return build.call(part, aten.sum.dim_IntList, grad, [0, 2, 3])
    mask = [False, True, False]
    both = build.call(part, call.target, grad, x, weight, *rest, mask)
    return build.call(part, operator.getitem, both, 1)


def _input_gradient(
    part: Node, operands: tuple[Node, Node], rest: list[Any], build: NodeBuilder
) -> Node:
    grad, weight = operands
    stride, padding, dilation, is_transposed, _, groups = rest
    points = known_tensor(weight).shape[2:]
    triples = zip(points, padding, dilation, strict=True)
    added = [int(d * (n - 1) - p) for n, p, d in triples]
    turned = build.call(part, aten.flip.default, weight, [2, 3])
    spec = (stride, added, dilation, is_transposed, [0, 0], groups)
    return build.call(part, aten.convolution.default, grad, turned, None, *spec)
