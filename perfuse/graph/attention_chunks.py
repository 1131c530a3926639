"""FlexAttention that no kernel computes: some queries at a time.

PyTorch's own computes all scores of a call in memory, which grows with the square of the length.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from perfuse.graph.copying import GraphCopy, copy_but_for

_NAME = "flex_attention"
SCORE_BYTES = 32 << 20  # of the scores in memory at one time
_SMALLEST = 16  # queries at a time


def attend_by_chunks(gm: GraphModule) -> GraphModule:
    """The pass: the same call, which may become a kernel, by another name."""
    if not any(_is_attention(node) for node in gm.graph.nodes):
        return gm

    def make(node: Node, new: GraphCopy) -> Node:
        made = new.copy(node)
        if _is_attention(node):
            made.target = flex_attention_by_chunks
        return made

    return copy_but_for(gm, make)


def _is_attention(node: Node) -> bool:
    return node.op == "call_function" and str(node.target) == _NAME


def flex_attention_by_chunks(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor],
    block_mask: Sequence[Any], scale: float, options: dict[str, Any],
    score_buffers: tuple[Any, ...] = (), mask_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The results of the higher-order op, computed one chunk of queries after another."""
    batch, heads, length, _ = query.shape
    row_bytes = batch * heads * key.shape[2] * torch.float32.itemsize
    step = max(_SMALLEST, SCORE_BYTES // max(row_bytes, 1))
    parts = []
    for start in range(0, max(length, 1), step):  # no queries are a chunk too
        score, mask = _moved(score_mod, 3, start), _moved(block_mask[-1], 2, start)
        some = (query[:, :, start : start + step], key, value, score, (*block_mask[:-1], mask))
        rest = (scale, options, score_buffers, mask_buffers)
        parts.append(torch.ops.higher_order.flex_attention(*some, *rest))
    # Traced as float32; of doubles they are doubles.
    numbers = [[part[i].float() for part in parts] for i in (1, 2)]
    if len(parts) == 1:
        return parts[0][0], numbers[0][0], numbers[1][0]
    out = query.new_empty(batch, heads, length, value.shape[3])
    out = _laid_out_as(out, query)
    torch.cat([part[0] for part in parts], 2, out=out)
    sums, largest = (torch.cat(of_parts, 2) for of_parts in numbers)
    return out, sums, largest


def _moved(function: Callable[..., Tensor], place: int, start: int) -> Callable[..., Tensor]:
    """A function whose argument at a place, the number of a query, counts from a start."""
    if start == 0:
        return function

    def moved(*args: Any) -> Tensor:
        return function(*args[:place], args[place] + start, *args[place + 1 :])

    return moved


def _laid_out_as(tensor: Tensor, like: Tensor) -> Tensor:
    """The memory of a tensor in the order of another's dimensions, features innermost."""
    last = tensor.ndim - 1
    strides = like.stride()
    order = sorted(range(last), key=lambda d: -strides[d])
    shape = [tensor.shape[d] for d in (*order, last)]
    made = tensor.new_empty(shape)
    places = [*order, last]
    return made.permute([places.index(d) for d in range(tensor.ndim)])
