"""Batched matmuls with one matrix for the whole batch, on a CPU: a matmul of all rows.

A linear layer without bias over transposed tokens is such a batch: PyTorch expands the weight, and
the library gets a copy of it for every sequence. Rows that are not neighbours in memory are copied
instead, which the kernel that computes them does on the way. In a backward, the sum over the batch
of its products is a matmul too, and the products are never stored.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from perfuse.context import Context
from perfuse.graph.facts import known_tensor, packet_name, tensor_of
from perfuse.graph.rewrite import NodeBuilder, replace_calls

aten = torch.ops.aten

# A copy of the rows costs as much as so many columns of their product.
MIN_COLUMNS = 32


def broadcast_matmuls(gm: GraphModule, context: Context) -> GraphModule:
    """The pass."""
    products = gm.graph.find_nodes(op="call_function", target=aten.bmm.default)
    if context.target.gpu is not None or not products:
        return gm
    known = [node for node in products if _has_known_sizes(node)]
    one_matrix = dict.fromkeys(node for node in known if _has_one_matrix(node))
    gm = replace_calls(gm, one_matrix, _product)
    sums = gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    return replace_calls(gm, dict.fromkeys(node for node in sums if _is_sum_of_batch(node)), _sum)


def _has_known_sizes(node: Node) -> bool:
    operands = [t for n in node.args if (t := tensor_of(n)) is not None]
    if len(operands) != 2 or node.kwargs or not all(t.is_floating_point() for t in operands):
        return False
    sizes = [n for t in operands for n in (*t.shape, *t.stride())]
    return all(isinstance(n, int) for n in sizes) and all(t.numel() for t in operands)


def _has_one_matrix(node: Node) -> bool:
    """Whether the second operand is one matrix, for rows worth a copy if they need one."""
    rows, matrices = known_tensor(node.args[0]), known_tensor(node.args[1])
    is_one = matrices.shape[0] > 1 and matrices.stride(0) == 0
    return is_one and (_is_matrix(rows) or matrices.shape[2] >= MIN_COLUMNS)


def _is_matrix(batch: torch.Tensor) -> bool:
    """Whether the rows of all matrices are the rows of one."""
    return batch.shape[1] == 1 or batch.stride(0) == batch.stride(1) * batch.shape[1]


def _product(bmm: Node, _: None, build: NodeBuilder, copy: dict[Node, Node]) -> Node:
    rows, matrices = _operands(bmm, copy)
    matrix = build.call(bmm, aten.select.int, matrices, 0, 0)
    product = build.call(bmm, aten.mm.default, _rows(bmm, rows, build), matrix)
    return build.call(bmm, aten.view.default, product, list(known_tensor(bmm).shape))


def _operands(bmm: Node, copy: dict[Node, Node]) -> list[Node]:
    return [copy[n] for n in bmm.args if isinstance(n, Node)]


def _rows(like: Node, batch: Node, build: NodeBuilder) -> Node:
    """The rows of all matrices, in one."""
    value = known_tensor(batch)
    if not _is_matrix(value):
        batch = build.call(like, aten.clone.default, batch, memory_format=torch.contiguous_format)
    return build.call(like, aten.view.default, batch, [-1, value.shape[2]])


# -- sums over a batch ---------------------------------------------------------------------------


def _is_sum_of_batch(node: Node) -> bool:
    """A sum of products that nothing else reads, one of whose operands need not be copied."""
    product, axes, *_ = node.args
    if not isinstance(product, Node) or axes not in ([0], [-3]) or node.kwargs:
        return False
    if packet_name(product) != "bmm" or list(product.users) != [node]:
        return False
    if not _has_known_sizes(product):
        return False
    left, right = (known_tensor(n) for n in product.args)
    return left.shape[0] > 1 and (_is_matrix(left.mT) or _is_matrix(right))


def _sum(node: Node, _: None, build: NodeBuilder, copy: dict[Node, Node]) -> Node:
    product = node.args[0]
    assert isinstance(product, Node)
    left, right = _operands(product, copy)
    transposed = build.call(node, aten.permute.default, left, [0, 2, 1])
    columns = build.call(node, aten.permute.default, _rows(node, transposed, build), [1, 0])
    total = build.call(node, aten.mm.default, columns, _rows(node, right, build))
    return build.call(node, aten.view.default, total, list(known_tensor(node).shape))
