"""Matmuls on a GPU whose rows do not start at multiples of sixteen bytes: padded until they do.

The library has fast kernels only for tensors with aligned rows: a matmul with a vocabulary of
50257 columns and its gradients take several times as long as with 50264. Zeros are added where
they add nothing, and what they give is cut off. Padding fuses into whatever makes an operand, and
cutting off into whatever reads the result; where neither can be, memory is copied, and that has to
be worth it.

A large result that is kept is never padded: with its padding and without, it would be in memory
twice. Rows that are eight apart have equal alignment, so eight matmuls with aligned rows fill
it, all but some columns at its edges (`aligned_matmul`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.config import ThresholdSettings
from perfuse.context import Context
from perfuse.gpu import Gpu
from perfuse.graph.aliases import users_through
from perfuse.graph.aligned_matmul import aligned_matmul
from perfuse.graph.facts import is_same_tensor, known_tensor, tensor_of
from perfuse.graph.rewrite import NodeBuilder, replace_calls
from perfuse.ir.matmul import MatmulOp, Operands, matmul_op
from perfuse.torch_compat.ops import is_view_op

aten = torch.ops.aten
_ALIGNED_BYTES = 16

_FEWEST_COLUMNS = 512  # the edges are computed twice


@dataclass(frozen=True, slots=True)
class _Padding:
    """The sides that a matmul should have."""

    rows: int
    depth: int
    columns: int
    fills_result: bool = False  # the result as it is, by matmuls with aligned rows


@dataclass(frozen=True, slots=True)
class PaddingConditions:
    """The conditions under which padding pays: the GPU, the settings, the layout of tensors."""

    gpu: Gpu
    thresholds: ThresholdSettings
    device: str = "cuda"


def pad_matmuls(gm: GraphModule, context: Context) -> GraphModule:
    """The pass."""
    gpu = context.target.gpu
    return gm if gpu is None else padded(gm, PaddingConditions(gpu, context.settings.thresholds))


def padded(gm: GraphModule, conditions: PaddingConditions) -> GraphModule:
    """The module with matmuls padded where that pays.

    Below `padded_matmul_work` launches count, not bytes. Of the eight matmuls that fill a
    result each should have `filled_matmul_elements`, two tiles of 128x256 for each processor of an
    H200: copies of smaller results take less time than eight launches.
    """
    every = {n: _padding_of(n, conditions) for n in gm.graph.nodes}
    found = {node: padding for node, padding in every.items() if padding is not None}
    return replace_calls(gm, found, _padded)


def _padding_of(node: Node, conditions: PaddingConditions) -> _Padding | None:
    """The padding of a matmul; None if it needs none."""
    thresholds = conditions.thresholds
    row = _matrix_row(node)
    if row is None or node.kwargs:
        return None
    given = row.operands(node.args)
    a, b = tensor_of(given.a), tensor_of(given.b)
    if a is None or b is None or a.device.type != conditions.device or a.dtype not in _HALVES:
        return None
    bias = tensor_of(given.bias)
    if given.bias is not None and (bias is None or bias.shape != b.shape[1:]):
        return None
    sides = (*a.shape, b.shape[1])
    if not all(isinstance(n, int) for n in (*sides, *a.stride(), *b.stride())):
        return None
    rows, depth, columns = (int(n) for n in sides)
    if rows * depth * columns < max(1, thresholds.padded_matmul_work):
        return None
    unit = _ALIGNED_BYTES // a.element_size()
    padded = _Padding(
        _up(rows, unit) if _runs_down(a) else rows,
        depth if _runs_down(a) and not _runs_down(b) else _up(depth, unit),
        _up(columns, unit),
    )
    if padded == _Padding(rows, depth, columns):
        return None
    num_each = rows * columns // unit
    is_large = columns >= _FEWEST_COLUMNS and num_each >= thresholds.filled_matmul_elements
    if columns != padded.columns and is_large and _is_kept(node) and _can_fill(given, padded, unit):
        padded = _Padding(rows, padded.depth, columns, fills_result=True)
    gain = _gain_bytes(a, b, unit, conditions.gpu)
    return padded if gain > _copied_bytes(node, given, padded) else None


def _matrix_row(node: Node) -> MatmulOp | None:
    """The row of a matmul of two matrices; None for batches of them, and other ops."""
    row = matmul_op(node.target)
    return row if row is not None and row.rank == 2 else None


def _can_fill(given: Operands[Any], padded: _Padding, unit: int) -> bool:
    """Whether matmuls with aligned rows can fill the result of this one without any copy.

    They read every eighth row of one operand and windows of the other's columns, both of which have
    to be aligned, or padded to be. A bias has no windows that start at aligned addresses.
    """
    a, b = known_tensor(given.a), known_tensor(given.b)
    is_aligned = padded.depth != a.shape[1] or not any(_pitch(x) % unit for x in (a, b))
    is_plain = a.stride(1) == 1 and _runs_down(b) and given.bias is None
    return is_plain and is_aligned


def _gain_bytes(a: torch.Tensor, b: torch.Tensor, unit: int, gpu: Gpu) -> float:
    """The time that padding saves, in bytes that could be copied instead."""
    is_slow = any(_pitch(x) % unit for x in (a, b))
    slowdown = gpu.unaligned_operand_slowdown if is_slow else gpu.unaligned_result_slowdown
    rows, depth = a.shape
    return (slowdown - 1) * 2 * rows * depth * b.shape[1] / gpu.matmul_work_per_byte


def _copied_bytes(node: Node, given: Operands[Any], made: _Padding) -> int:
    """The bytes that padding copies, unless another loop writes them padded."""
    a, b = given.a, given.b
    moved = 0
    for operand, shape in ((a, (made.rows, made.depth)), (b, (made.depth, made.columns))):
        tensor = known_tensor(operand)
        if tuple(tensor.shape) != shape and not _is_computed(operand):
            moved += 2 * tensor.element_size() * shape[0] * shape[1]
    if _is_kept(node) and made.columns != b.meta["val"].shape[1]:
        moved += 2 * a.meta["val"].element_size() * made.rows * made.columns
    return moved


def _pitch(x: torch.Tensor) -> int:
    """Elements from one row, or column, to the next."""
    return int(x.stride(1) if _runs_down(x) else x.stride(0))


def _is_computed(node: Node) -> bool:
    """Whether a generated loop computes it, and can leave room for padding."""
    while _only_looks(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.op == "call_function" and _matrix_row(node) is None


def _is_kept(node: Node) -> bool:
    """It is a result of the graph, or an operand of a library call."""
    users = users_through(node, _only_looks)
    return any(user.op == "output" or _matrix_row(user) is not None for user in users)


def _only_looks(node: Node) -> bool:
    return node.op == "call_function" and (is_view_op(node.target) or node.target in _VIEWS)


_VIEWS = (aten._unsafe_view.default, aten.reshape.default)
_HALVES = (torch.float16, torch.bfloat16)
_CONTIGUOUS = torch.contiguous_format


def _runs_down(x: torch.Tensor) -> bool:
    """It is column-major in memory."""
    return bool(x.stride(0) == 1 and x.stride(1) != 1)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _padded(node: Node, made: _Padding, build: NodeBuilder, copy: dict[Node, Node]) -> Node:
    row = _matrix_row(node)
    assert row is not None
    given = row.operands(node.args)
    bias = None
    if given.bias is not None:
        bias = _filled_row(node, copy[given.bias], made.columns, build)
    a = _filled(node, copy[given.a], made.rows, made.depth, build)
    b = _filled(node, copy[given.b], made.depth, made.columns, build)
    wanted = known_tensor(node)
    if made.fills_result:
        result = build.call(node, aligned_matmul, a, b)
    else:
        result = build.call(node, node.target, *row.arguments(Operands(a, b, bias)))
        for dim, size in enumerate(wanted.shape):
            result = build.call(node, aten.slice.Tensor, result, dim, 0, int(size))
        result = build.call(node, aten.clone.default, result, memory_format=_CONTIGUOUS)
    assert is_same_tensor(wanted, known_tensor(result))
    return result


def _filled_row(node: Node, bias: Node, columns: int, build: NodeBuilder) -> Node:
    """A bias with zeros to this size."""
    extra = columns - int(known_tensor(bias).shape[0])
    return build.call(node, aten.constant_pad_nd.default, bias, [0, extra]) if extra else bias


def _filled(node: Node, x: Node, rows: int, columns: int, build: NodeBuilder) -> Node:
    """An operand padded with zeros to these sizes, in the same layout."""
    tensor = known_tensor(x)
    down, right = rows - int(tensor.shape[0]), columns - int(tensor.shape[1])
    if not down and not right:
        return x
    if not _runs_down(tensor):
        return build.call(node, aten.constant_pad_nd.default, x, [0, right, 0, down])
    transposed = build.call(node, aten.transpose.int, x, 0, 1)
    padded = build.call(node, aten.constant_pad_nd.default, transposed, [0, down, 0, right])
    return build.call(node, aten.transpose.int, padded, 0, 1)
