"""Batch norms after convolutions with frozen parameters: folded into weight and bias.

In inference a batch norm multiplies each channel by one number and adds another. So does whatever
else scales or shifts the channels of a convolution by frozen values; a chain of such steps is
folded as a whole. Weights are multiplied and rounded once, when they are prepared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.graph.facts import known_tensor, tensor_of
from perfuse.graph.frozen import frozen_nodes
from perfuse.graph.rewrite import NodeBuilder, replace_calls

aten = torch.ops.aten

_SCALES = (aten.mul.Tensor, aten.div.Tensor)
_SHIFTS = (aten.add.Tensor, aten.sub.Tensor)
_COMMUTE = (aten.mul.Tensor, aten.add.Tensor)
Steps = list[tuple[Any, Any]]  # an op, and what it combines each channel with


def fold_norms(gm: GraphModule) -> GraphModule:
    """The pass: nothing where no input is frozen."""
    frozen = frozen_nodes(gm)
    if not frozen:
        return gm
    chains = (_chain(node, frozen) for node in _convolutions(gm, frozen))
    found = {last: (conv, steps) for conv, last, steps in chains if _is_worth_it(steps)}
    return replace_calls(gm, found, _folded)


def _convolutions(gm: GraphModule, frozen: set[Node]) -> Iterator[Node]:
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        _, weight, bias, _, _, _, is_transposed, *_ = node.args
        is_frozen = weight in frozen and (bias is None or bias in frozen)
        if is_frozen and not is_transposed and known_tensor(node).dtype is torch.float32:
            yield node


def _chain(conv: Node, frozen: set[Node]) -> tuple[Node, Node, Steps]:
    """The steps after a convolution, as long as nothing else reads the values in between."""
    last, steps = conv, Steps()
    while len(last.users) == 1:
        (user,) = last.users
        other = _other(user, last)
        if other is None or not _is_by_channel(other, user, frozen):
            break
        steps.append((user.target, other))
        last = user
    return conv, last, steps


def _other(user: Node, value: Node) -> Any:
    """The other operand of a step; None if it is not one."""
    if user.target not in (*_SCALES, *_SHIFTS) or user.kwargs or len(user.args) != 2:
        return None
    left, right = user.args
    if left is value:
        return None if right is value else right
    return left if user.target in _COMMUTE else None


def _is_by_channel(other: Any, user: Node, frozen: set[Node]) -> bool:
    """A number, or a frozen tensor with a value for each channel or one for all."""
    result = known_tensor(user)
    if isinstance(other, (int, float)) and not isinstance(other, bool):
        return result.dtype is torch.float32
    tensor = tensor_of(other)
    if tensor is None or other not in frozen or tensor.dtype is not torch.float32:
        return False
    if tensor.dim() > result.dim() or result.dtype is not torch.float32:
        return False
    sizes = [1] * (result.dim() - tensor.dim()) + list(tensor.shape)
    return sizes[1] in (1, result.shape[1]) and all(n == 1 for n in (sizes[0], *sizes[2:]))


def _is_worth_it(steps: Steps) -> bool:
    """Whether any step reads memory: a number alone is free in the loop that follows."""
    return any(isinstance(other, Node) for _, other in steps)


def _folded(
    last: Node, found: tuple[Node, Steps], build: NodeBuilder, copy: dict[Node, Node]
) -> Node:
    """The convolution in the place of the last step, its weight and bias changed by all."""
    conv, steps = found
    given, weight, bias, *rest = conv.args
    kernel = known_tensor(weight)
    num_channels, rank = int(kernel.shape[0]), kernel.dim()
    scaled, shift = copy[weight], None if bias is None else copy[bias]  # type: ignore[index]
    for op, other in steps:
        by = copy[other] if isinstance(other, Node) else other
        if op in _SCALES:
            scaled = build.call(conv, op, scaled, _shaped(conv, by, [-1] + [1] * (rank - 1), build))
        if op in _SCALES and shift is None:
            continue
        by = _shaped(conv, by, [-1], build)
        if shift is None:
            shift = build.call(conv, aten.new_zeros.default, scaled, [num_channels])
        shift = build.call(conv, op, shift, by)
    return build.call(last, aten.convolution.default, copy[given], scaled, shift, *rest)  # type: ignore[index]


def _shaped(like: Node, by: Any, shape: list[int], build: NodeBuilder) -> Any:
    return build.call(like, aten.view.default, by, shape) if isinstance(by, Node) else by
