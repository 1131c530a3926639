"""Values that eager copies to make them contiguous: computed that way in the first place.

A transformer behind a convolution (of speech, of patches) reads its result transposed, and eager's
elementwise ops keep those strides for every residual sum that follows. Each norm copies the sum,
as it wants contiguous rows. On a CPU a norm over such rows uses one element of each cache line.
So a value that a `clone` makes contiguous is contiguous here, and its elementwise users with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.context import Context
from perfuse.graph.channels_last import is_decided
from perfuse.graph.copying import GraphCopy, copy_but_for
from perfuse.graph.facts import tensor_of
from perfuse.graph.relayout import Relayout, is_any_layout
from perfuse.graph.rewrite import NodeBuilder

aten = torch.ops.aten
PLAIN = torch.contiguous_format


def lay_row_major(gm: GraphModule, context: Context) -> GraphModule:
    """The pass; a graph that would restore more strides than it saves copies is left unchanged.

    In a half of a joint graph, the copies at the borders of channels-last layouts are meant.
    """
    if context.target.gpu is not None or is_decided(gm):
        return gm
    copies = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    chosen = {n.args[0] for n in copies if n.kwargs == {"memory_format": PLAIN}}
    chosen = {n for n in chosen if isinstance(n, Node) and _is_transposed(n)}
    if not chosen:
        return gm
    layouts = _RowMajor(chosen)
    made = copy_but_for(gm, layouts.make)
    return made if len(layouts.restored) < len(chosen) else gm


def _is_transposed(node: Node) -> bool:
    """A computed value that covers memory once, and whose rows are not contiguous."""
    tensor = tensor_of(node)
    if tensor is None or not is_any_layout(node) or tensor.dim() < 3:
        return False
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if not all(isinstance(n, int) for n in (*shape, *strides)) or 0 in shape:
        return False
    return strides[-1] != 1 and shape[-1] != 1 and _covers_memory_once(shape, strides)


def _covers_memory_once(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


class _RowMajor(Relayout):
    """Makes the chosen values contiguous."""

    def __init__(self, chosen: set[Any]) -> None:
        super().__init__()
        self._chosen = chosen

    def make(self, node: Node, new: GraphCopy) -> Node:
        made = super().make(node, new)
        if node not in self._chosen or made.meta["val"].is_contiguous():
            return made
        return NodeBuilder(new.graph).call(node, aten.clone.default, made, memory_format=PLAIN)
