"""FlexAttention: the higher-order ops of attention with functions of scores, as nodes of our own.

What the kernels cannot compute raises CannotLower: the op runs as PyTorch's own, which has all
scores in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.attention import (
    REGISTERS,
    SCORE,
    SCORE_GRADIENT,
    Attention,
    AttentionPart,
    BlockList,
    BlockMask,
    Saved,
    score_atom,
    score_position,
)
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer, View, contiguous_strides
from perfuse.lower.builder import Builder
from perfuse.lower.families.pointwise import add, multiply
from perfuse.lower.functions import applied, function_of
from perfuse.lower.layout import dense_strides, memory_order
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, cast_tensor
from perfuse.lower.traced import value as value_of

_DTYPES = (DType.F16, DType.BF16, DType.F32)
_LARGEST_HEAD = 256
_SMALLEST_BLOCK = 16  # that matrix units multiply


@dataclass(frozen=True, slots=True)
class _Mask:
    """The block mask as the op is given it."""

    keys: tuple[Any, ...]  # of each block of queries: counts, indices, counts and indices of full
    queries: tuple[Any, ...]  # of each block of keys, likewise
    query_block: int
    key_block: int
    function: Any

    @staticmethod
    def of(block_mask: Sequence[Any], traced: Sequence[Any]) -> _Mask:
        # Code depends on the size of a block: a symbol that stands for it is guarded to be it.
        query_block, key_block = (int(value_of(size)) for size in traced[-3:-1])
        function = block_mask[-1]
        keys, queries = tuple(block_mask[2:6]), tuple(block_mask[6:10])
        return _Mask(keys, queries, query_block, key_block, function)


@lowers("higher_order.flex_attention")
def flex_attention(
    builder: Builder, query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any,
    scale: float, options: Any, score_buffers: Any = (), mask_buffers: Any = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    operands = (query, key, value)
    _check(builder, operands)
    mask = _Mask.of(block_mask, builder.arguments[4])
    views = _views(builder, operands)
    sizes = (*query.shape[:3], key.shape[2])
    score, keep = _functions(builder, sizes, score_mod, score_buffers, mask.function, mask_buffers)
    shape = (*query.shape[:3], value.shape[3])
    out = builder.new_buffer(query.dtype, shape, _result_strides(shape, views[0]))
    numbers = [builder.new_buffer(DType.F32, query.shape[:3]) for _ in range(2)]
    results = (out, *numbers)
    blocks = _blocks(builder, mask.keys, mask.query_block, mask.key_block)
    node = _node(builder, AttentionPart.FORWARD, views, blocks, scale, (score, keep), results)
    builder.call(node)
    made, logsumexp, largest = (builder.tensor_of(buffer) for buffer in results)
    return made, logsumexp, largest


def _check(builder: Builder, operands: Sequence[Tensor]) -> None:
    """Raise CannotLower where the kernels do not compute attention of these tensors."""
    query, key, value = operands
    if not builder.is_gpu:
        raise CannotLower("attention with functions of scores is a kernel on GPUs alone")
    if len({x.dtype for x in operands}) > 1 or query.dtype not in _DTYPES:
        raise CannotLower("attention of mixed dtypes, or other than float16, bfloat16, float32")
    for x in (query, value):
        size = x.shape[3]
        if not isinstance(size, int) or not 0 < size <= _LARGEST_HEAD:
            raise CannotLower(f"attention with heads of size {size}")
    if ix.exact_div(query.shape[1], key.shape[1]) is None:
        raise CannotLower("the number of heads of keys does not divide that of queries")
    if any(size == 0 for x in operands for size in x.shape):
        raise CannotLower("attention of an empty tensor")
    if key.shape[0] != query.shape[0] and key.shape[0] != 1:
        raise CannotLower("attention of keys with another batch size")


def _views(builder: Builder, tensors: Sequence[Tensor], first: int = 0) -> tuple[View, ...]:
    """Operands in memory: where they are, else in the layout of the graph."""
    found = []
    for number, tensor in enumerate(tensors):
        traced = builder.arguments[first + number]
        view = builder.window_on(tensor)
        if view is None or builder.buffers[view.buffer].dtype is not tensor.dtype:
            view = builder.view_of(tensor, dense_strides(traced, builder.symbols))
        found.append(view)
    return tuple(found)


def _functions(
    builder: Builder, sizes: Sequence[Dim], score_mod: Any, score_buffers: Any, mask_mod: Any,
    mask_buffers: Any,
) -> tuple[Expr, Expr]:  # fmt: skip
    """The score that is exponentiated, and whether it is kept, of the score at a position."""
    places = _places(sizes)
    score = _formula(builder, score_mod, [_SCORE, *places, *score_buffers])
    keep = _formula(builder, mask_mod, [*places, *mask_buffers])
    return ex.cast(score, DType.F32), ex.cast(keep, DType.BOOL)


_SCORE = Tensor((), DType.F32, SCORE)


def _places(sizes: Sequence[Dim]) -> list[Tensor]:
    batch, heads, queries, keys = sizes
    position = score_position((batch, heads, queries, keys))
    return [Tensor((), DType.I64, ex.index_value(place)) for place in position]


def _formula(builder: Builder, function: Any, args: Sequence[Any]) -> Expr:
    """The formula of the first result of a function."""
    result = _results(builder, function, args)
    first = result[0] if isinstance(result, list | tuple) else result
    if not isinstance(first, Tensor) or first.ndim:
        raise CannotLower("a function of scores does not return one number")
    return first.value


def _results(builder: Builder, function: Any, args: Sequence[Any]) -> Any:
    places = [arg.value.variables() for arg in args if isinstance(arg, Tensor) and not arg.ndim]
    own = {atom for atoms in places for atom in atoms} | {score_atom()}
    return applied(builder, function_of(builder, function), args, own)


def _blocks(builder: Builder, tables: Sequence[Any], rows: int, others: int) -> BlockMask:
    counts, indices, full_counts, full_indices = tables
    if counts is None or indices is None:
        raise CannotLower("its block mask has no lists of blocks for the gradient")
    down = None if counts.shape[2] == 1 else rows
    across = None if indices.shape[3] == 1 else others
    for block in (down, across):
        if block is not None and block % _SMALLEST_BLOCK:
            raise CannotLower(f"blocks of {block} in its mask are no multiple of {_SMALLEST_BLOCK}")
    partial = _block_list(builder, counts, indices)
    full = None if full_counts is None else _block_list(builder, full_counts, full_indices)
    return BlockMask(partial, full, down, across)


def _block_list(builder: Builder, counts: Tensor, indices: Tensor) -> BlockList:
    """The lists in memory; what is known of them is not read."""
    is_one = indices.shape[3] == 1
    is_always_one = is_one and counts.value.op == "const" and counts.value.attr == 1
    return BlockList(
        None if is_always_one else builder.view_of(counts),
        None if is_one else builder.view_of(indices),
    )


def _result_strides(shape: Sequence[Dim], like: View) -> tuple[Dim, ...]:
    """Strides in the order of another tensor's, with features innermost."""
    order = memory_order(like.shape, like.strides) or list(range(len(shape)))
    last = len(shape) - 1
    order = [*(d for d in order if d != last), last]
    steps = contiguous_strides(tuple(shape[d] for d in order))
    return tuple(steps[order.index(d)] for d in range(len(shape)))


def _node(
    builder: Builder, part: AttentionPart, views: Sequence[View], blocks: BlockMask, scale: float,
    functions: Sequence[Expr], results: Sequence[Buffer], saved: Saved | None = None,
) -> Attention:  # fmt: skip
    if not isinstance(scale, int | float):
        raise CannotLower("attention with a scale that is not a number")
    query, key, value = views
    score, mask, *gradient = functions
    loads = [load.buffer for value in functions for load in ex.loads_of(value)]
    names = [name for name in dict.fromkeys(loads) if name not in REGISTERS]
    whole = [builder.buffers[name] for name in names]
    return Attention(
        part,
        query,
        key,
        value,
        blocks,
        float(scale),
        score,
        mask,
        tuple(buffer.name for buffer in results),
        captured=tuple(View(b.name, b.shape, b.strides) for b in whole),
        score_gradient=gradient[0] if gradient else None,
        saved=saved,
        origin=builder.origin,
    )


# -- gradients -----------------------------------------------------------------------------


@lowers("higher_order.flex_attention_backward")
def flex_attention_backward(
    builder: Builder, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    grad_out: Tensor | None, grad_logsumexp: Tensor | None, score_mod: Any, joint: Any,
    block_mask: Any, scale: float, options: Any, score_buffers: Any = (), mask_buffers: Any = (),
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:  # fmt: skip
    operands = (query, key, value)
    _check(builder, operands)
    if grad_out is None:
        raise CannotLower("the gradient of its result is not given")
    if key.shape[0] != query.shape[0]:
        raise CannotLower("the gradient of keys that a batch shares")
    mask = _Mask.of(block_mask, builder.arguments[9])
    views = _views(builder, operands)
    sizes = (*query.shape[:3], key.shape[2])
    score, keep = _functions(builder, sizes, score_mod, score_buffers, mask.function, mask_buffers)
    gradient = _score_gradient(builder, joint, sizes, score_buffers)
    functions = (score, keep, gradient)
    saved = _saved(builder, out, logsumexp, grad_out, grad_logsumexp)
    by_query = _blocks(builder, mask.keys, mask.query_block, mask.key_block)
    by_key = _blocks(builder, mask.queries, mask.key_block, mask.query_block)
    made = [_gradient_of(builder, x, view) for x, view in zip(operands, views, strict=True)]
    for part, blocks, results in (
        (AttentionPart.QUERY_GRADIENT, by_query, made[:1]),
        (AttentionPart.KEY_GRADIENT, by_key, made[1:]),
    ):
        builder.call(_node(builder, part, views, blocks, scale, functions, results, saved))
    of_query, of_key, of_value = (builder.tensor_of(buffer) for buffer in made)
    return of_query, of_key, of_value, (None,) * len(score_buffers)


def _gradient_of(builder: Builder, tensor: Tensor, view: View) -> Buffer:
    return builder.new_buffer(tensor.dtype, tensor.shape, _result_strides(tensor.shape, view))


def _score_gradient(
    builder: Builder, joint: Any, sizes: Sequence[Dim], score_buffers: Sequence[Any]
) -> Expr:
    """The gradient of the score of a product, of that of the score that was exponentiated."""
    given = Tensor((), DType.F32, SCORE_GRADIENT)
    args = [_SCORE, *_places(sizes), given, *score_buffers]
    first, *rest = _results(builder, joint, args)
    if any(gradient is not None for gradient in rest):
        raise CannotLower("the gradient of a tensor that a function of scores reads")
    if first is None:  # the score that is exponentiated does not depend on it
        return ex.const(0.0, DType.F32)
    return ex.cast(first.value, DType.F32)


def _saved(
    builder: Builder, out: Tensor, logsumexp: Tensor, grad_out: Tensor,
    grad_logsumexp: Tensor | None,
) -> Saved:  # fmt: skip
    """The gradient of each weight is what its value has with the gradient of the result, less
    the same number for all weights of a query: what is left keeps their sum at one."""
    products = multiply(builder, cast_tensor(out, DType.F32), cast_tensor(grad_out, DType.F32))
    delta = builder.reduce("sum", products, [3], DType.F32)
    if grad_logsumexp is not None:
        of_base_2 = multiply(builder, grad_logsumexp, -1.0 / math.log(2))
        delta = add(builder, delta, of_base_2)
    (gradient,) = _views(builder, [grad_out], first=5)
    return Saved(gradient, builder.view_of(logsumexp), builder.view_of(delta))
