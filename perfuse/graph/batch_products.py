"""Several tiny products of one value with constant weights, as one batched product.

A tiny product is mostly the cost of calling the library, so one call for many pays. It only
does when the weights are constants of the graph (tensors spelled out in the program, or folded
from such: a Fourier matrix), because then they are stacked once, here. Parameters are inputs.
Measured on one core of the build machine, float32, microseconds (separate -> stacked here ->
stacked on every call):

    3 of 1x64x64    4.4 ->  2.3 ->  8.4        3 of 64x64x64     49 ->   33 ->   54
    8 of 32x32x32    31 ->  8.2 ->   32        8 of 128x64x64   206 ->  189 ->  202
    3 of 4x256x256   91 ->   89 ->  188        8 of 1x768x768  1454 -> 2297 -> 8101

So: weights that are inputs stay as they are, whatever their size, and so do products of more than
64 x 64 x 64 multiplications or weights of more than 64 x 64 elements.
"""

from collections import defaultdict
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from perfuse.graph.aliases import Aliases
from perfuse.graph.copying import copy_node
from perfuse.graph.facts import attribute_of, attributes_of, tensor_of
from perfuse.ir.matmul import matmul_op
from perfuse.torch_compat import disable_dispatch_modes, module_of

MIN_PRODUCTS = 3
MAX_WEIGHT = 64 * 64
MAX_MULTIPLICATIONS = 64 * 64 * 64

aten = torch.ops.aten
Key = tuple[Node, tuple[int, ...], torch.dtype]


def batch_products(gm: GraphModule) -> GraphModule:
    """The pass."""
    groups = _groups(gm)
    return _Batch(gm, groups).run() if groups else gm


def _groups(gm: GraphModule) -> list[list[Node]]:
    """Products of one value with constants of one shape, where one call for all pays."""
    aliases = Aliases.of(gm.graph)
    found: dict[Key, list[Node]] = defaultdict(list)
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        key = _key(node, aliases)
        if key is not None:
            found[key].append(node)
    return [group for group in found.values() if len(group) >= MIN_PRODUCTS]


def _key(node: Node, aliases: Aliases) -> Key | None:
    row = matmul_op(node.target)
    assert row is not None
    left, right = row.operands(node.args).a, row.operands(node.args).b
    x, weight = tensor_of(left), tensor_of(right)
    if x is None or weight is None or not isinstance(left, Node) or not isinstance(right, Node):
        return None
    sizes = (*x.shape, *weight.shape)
    if right.op != "get_attr" or not all(isinstance(size, int) for size in sizes):
        return None
    # The products become parts of one buffer, which results of the graph must not share.
    classes = [aliases.of_node(n) for n in (node, left, right)]
    if classes[0].has_output or any(c.is_mutated for c in classes):
        return None
    is_tiny = weight.numel() <= MAX_WEIGHT and x.shape[0] * weight.numel() <= MAX_MULTIPLICATIONS
    is_plain = weight.device.type == "cpu" and weight.is_contiguous()
    return (left, tuple(weight.shape), weight.dtype) if is_tiny and is_plain else None


class _Batch:
    """Builds the new graph: the batched product where the first of its parts stood."""

    def __init__(self, gm: GraphModule, groups: list[list[Node]]) -> None:
        self._gm = gm
        self._group = {node: group for group in groups for node in group}
        self._new = Graph()
        self._copy: dict[Node, Node] = {}
        self._whole: dict[Node, Node] = {}  # the first of a group -> the batched product
        self._weights: dict[str, torch.Tensor] = {}

    def run(self) -> GraphModule:
        for node in self._gm.graph.nodes:
            part = self._part(node) if node in self._group else None
            self._copy[node] = part or copy_node(self._new, node, self._copy)
        self._new._codegen = self._gm.graph._codegen
        return module_of({**attributes_of(self._gm), **self._weights}, self._new)

    def _part(self, node: Node) -> Node:
        group = self._group[node]
        if group[0] not in self._whole:
            self._whole[group[0]] = self._product(group)
        index = group.index(node)
        return self._call(node, aten.select.int, self._whole[group[0]], 0, index)

    def _product(self, group: list[Node]) -> Node:
        first = group[0]
        x = self._copy[first.all_input_nodes[0]]
        sizes = [len(group), *x.meta["val"].shape]
        batch = self._call(first, aten.unsqueeze.default, x, 0)
        batch = self._call(first, aten.expand.default, batch, sizes)
        return self._call(first, aten.bmm.default, batch, self._stacked(group))

    def _stacked(self, group: list[Node]) -> Node:
        weights = [node.all_input_nodes[-1] for node in group]
        name = f"_stacked_{len(self._weights)}"
        with disable_dispatch_modes(), torch.no_grad():
            self._weights[name] = torch.stack(
                [attribute_of(self._gm, str(w.target)) for w in weights]
            )
        node = self._new.create_node("get_attr", name)
        node.meta = dict(weights[0].meta)
        node.meta["val"] = torch.stack([w.meta["val"] for w in weights])
        return node

    def _call(self, like: Node, target: Any, *args: Any) -> Node:
        node = self._new.call_function(target, args)
        node.meta = dict(like.meta)
        values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
        node.meta["val"] = target(*values)
        return node
