"""Several tiny matmuls of one value with constant weights, as one batched matmul.

A tiny matmul mostly costs the library call, so one call for many is faster, but only if the weights
are constants of the graph (tensors spelled out in the program, or folded from such: a Fourier
matrix), because then they are stacked once, here. Parameters are inputs. Measured on one core of
the build machine, float32, microseconds (separate -> stacked here -> stacked on every call):

    3 of 1x64x64    4.4 ->  2.3 ->  8.4        3 of 64x64x64     49 ->   33 ->   54
    8 of 32x32x32    31 ->  8.2 ->   32        8 of 128x64x64   206 ->  189 ->  202
    3 of 4x256x256   91 ->   89 ->  188        8 of 1x768x768  1454 -> 2297 -> 8101

So: weights that are inputs stay as they are, whatever their size, and so do matmuls of more than
64 x 64 x 64 multiplications or weights of more than 64 x 64 elements.
"""

from collections import defaultdict

import torch
from torch.fx import GraphModule, Node

from perfuse.graph.aliases import Aliases
from perfuse.graph.facts import attribute_of, attributes_of, tensor_of
from perfuse.graph.rewrite import NodeBuilder, replace_calls
from perfuse.ir.matmul import matmul_op
from perfuse.torch_compat.state import disable_dispatch_modes

MIN_MATMULS = 3
MAX_WEIGHT = 64 * 64
MAX_MULTIPLICATIONS = 64 * 64 * 64

aten = torch.ops.aten
Key = tuple[Node, tuple[int, ...], torch.dtype]


def batch_matmuls(gm: GraphModule) -> GraphModule:
    """The pass."""
    batch = _Batch(gm)
    found = {node: group for group in _groups(gm) for node in group}
    return replace_calls(gm, found, batch.part, batch.attributes)


def _groups(gm: GraphModule) -> list[list[Node]]:
    """Matmuls of one value with constants of one shape, where one call for all is faster."""
    aliases = Aliases.of(gm.graph)
    found: dict[Key, list[Node]] = defaultdict(list)
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        key = _key(node, aliases)
        if key is not None:
            found[key].append(node)
    return [group for group in found.values() if len(group) >= MIN_MATMULS]


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
    # The results become parts of one buffer, which results of the graph must not share.
    classes = [aliases.of_node(n) for n in (node, left, right)]
    if classes[0].num_outputs or any(c.is_mutated for c in classes):
        return None
    is_tiny = weight.numel() <= MAX_WEIGHT and x.shape[0] * weight.numel() <= MAX_MULTIPLICATIONS
    is_plain = weight.device.type == "cpu" and weight.is_contiguous()
    return (left, tuple(weight.shape), weight.dtype) if is_tiny and is_plain else None


class _Batch:
    """Replaces each matmul by a part of the batched one, which is created with the first."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._whole: dict[Node, Node] = {}  # the first of a group -> the batched matmul
        self.attributes = attributes_of(gm)

    def part(
        self, node: Node, group: list[Node], build: NodeBuilder, copy: dict[Node, Node]
    ) -> Node:
        if group[0] not in self._whole:
            self._whole[group[0]] = self._matmul(group, build, copy)
        whole = self._whole[group[0]]
        return build.call(node, aten.select.int, whole, 0, group.index(node))

    def _matmul(self, group: list[Node], build: NodeBuilder, copy: dict[Node, Node]) -> Node:
        first = group[0]
        x = copy[first.all_input_nodes[0]]
        sizes = [len(group), *x.meta["val"].shape]
        batch = build.call(first, aten.unsqueeze.default, x, 0)
        batch = build.call(first, aten.expand.default, batch, sizes)
        return build.call(first, aten.bmm.default, batch, self._stacked(group, build))

    def _stacked(self, group: list[Node], build: NodeBuilder) -> Node:
        weights = [node.all_input_nodes[-1] for node in group]
        name = f"_stacked_{len(self._whole)}"
        with disable_dispatch_modes(), torch.no_grad():
            held = [attribute_of(self._gm, str(w.target)) for w in weights]
            self.attributes[name] = torch.stack(held)
        return build.attribute(weights[0], name, torch.stack([w.meta["val"] for w in weights]))
