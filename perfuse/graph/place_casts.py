"""Casts to narrower types where the fewest bytes are cast and stored.

A cast of a concatenation is done part by part, where each part is stored: no wide concatenation is
written and read again. Casts of several views of one tensor become views of one cast of it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.graph.dead_code import eliminate_dead_code
from perfuse.graph.facts import WHOLE_VIEWS, is_same_tensor, output_nodes, packet_name, tensor_of
from perfuse.graph.rewrite import NodeBuilder, replace_calls

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Placement:
    """A cast of `source`, and the views of the cast, first to last."""

    source: Node
    views: tuple[Node, ...]
    dtype: torch.dtype

    def built(self, build: NodeBuilder, like: Node, copies: dict[Node, Node]) -> Node:
        made = self._cast(build, like, copies)
        for view in self.views:
            made = build.call(like, view.target, made, *view.args[1:])
        return made

    def _cast(self, build: NodeBuilder, like: Node, copies: dict[Node, Node]) -> Node:
        if packet_name(self.source) != "cat":
            return build.call(like, aten._to_copy.default, copies[self.source], dtype=self.dtype)
        parts: Any = self.source.args[0]
        casts = [
            build.call(like, aten._to_copy.default, copies[part], dtype=self.dtype)
            for part in parts
        ]
        return build.call(like, aten.cat.default, casts, *self.source.args[1:])


def place_casts(gm: GraphModule) -> GraphModule:
    """The pass. Results of the graph stay casts: their memory is seen by the caller."""
    outputs = set(output_nodes(gm.graph))
    found = {n: p for n in gm.graph.nodes if n not in outputs and (p := _placement(n)) is not None}
    num_casts = Counter((p.source, p.dtype) for p in found.values())
    chosen = {
        node: p
        for node, p in found.items()
        if (packet_name(p.source) == "cat" or (p.views and num_casts[p.source, p.dtype] > 1))
        and _keeps_strides(node, p)
    }
    if not chosen:
        return gm
    made = replace_calls(gm, chosen, lambda node, p, build, of: p.built(build, node, of))
    return eliminate_dead_code(made)


def _placement(node: Node) -> Placement | None:
    dtype = node.kwargs.get("dtype")
    if packet_name(node) != "_to_copy" or set(node.kwargs) != {"dtype"} or len(node.args) != 1:
        return None
    source, views = node.args[0], []
    while isinstance(source, Node) and _is_view(source):
        views.append(source)
        source = source.args[0]
    wide = tensor_of(source)
    if not isinstance(source, Node) or not isinstance(dtype, torch.dtype) or wide is None:
        return None
    is_narrower = dtype.is_floating_point and dtype.itemsize < wide.dtype.itemsize
    is_readable = packet_name(source) != "cat" or _has_equal_parts(source, wide.dtype)
    if not is_narrower or not wide.is_floating_point() or not is_readable:
        return None
    return Placement(source, tuple(reversed(views)), dtype)


def _is_view(node: Node) -> bool:
    return packet_name(node) in WHOLE_VIEWS and not node.kwargs and len(node.all_input_nodes) == 1


def _has_equal_parts(cat: Node, dtype: torch.dtype) -> bool:
    """Whether no part is converted as it is joined: a cast of it might round twice."""
    parts = cat.args[0]
    tensors = [tensor_of(part) for part in parts] if isinstance(parts, Sequence) else [None]
    return not cat.kwargs and all(t is not None and t.dtype == dtype for t in tensors)


def _keeps_strides(node: Node, placement: Placement) -> bool:
    """Whether the views fit the layout of the cast, and the last one has that of `node`."""
    source, wanted = placement.source, tensor_of(node)
    try:
        made = _fake_cast(source, placement.dtype)
        for view in placement.views:
            made = view.target(made, *view.args[1:])  # type: ignore[operator]
    except RuntimeError:
        return False
    return wanted is not None and is_same_tensor(made, wanted)


def _fake_cast(source: Node, dtype: torch.dtype) -> Any:
    if packet_name(source) != "cat":
        return source.meta["val"].to(dtype)
    parts: Any = source.args[0]
    return aten.cat.default([part.meta["val"].to(dtype) for part in parts], *source.args[1:])
