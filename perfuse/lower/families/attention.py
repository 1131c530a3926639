"""FlexAttention: attention with user functions of the scores, as `Attention` nodes.

What the kernels cannot compute raises CannotLower: the op runs as PyTorch's own, forward some
queries at a time, backward with all scores in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfuse.graph.attention_chunks import flex_attention_by_chunks
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
    ScoreScatter,
    score_atom,
    score_position,
)
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer, LoopKind, View, contiguous_strides
from perfuse.lower.builder import Builder
from perfuse.lower.families.indexing import data_index
from perfuse.lower.families.pointwise import add, multiply
from perfuse.lower.functions import Scattered, applied, function_of
from perfuse.lower.layout import dense_strides, memory_order
from perfuse.lower.registry import LOWERINGS, CannotLower, lowers
from perfuse.lower.tensor import Tensor, cast_tensor
from perfuse.lower.traced import value as value_of

_DTYPES = (DType.F16, DType.BF16, DType.F32)
_LARGEST_HEAD = 256  # on a GPU, whose processors hold a whole one
_LARGEST_CPU_HEAD = 1024
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
    check_operands(builder, operands)
    mask = _Mask.of(block_mask, builder.arguments[4])
    views = operand_views(builder, operands)
    sizes = (*query.shape[:3], key.shape[2])
    score, keep = _functions(builder, sizes, score_mod, score_buffers, mask.function, mask_buffers)
    shape = (*query.shape[:3], value.shape[3])
    out = builder.new_buffer(query.dtype, shape, _result_strides(shape, views[0]))
    numbers = [builder.new_buffer(DType.F32, query.shape[:3]) for _ in range(2)]
    results = (out, *numbers)
    blocks = _blocks(builder, mask.keys, mask.query_block, mask.key_block)
    operation = Operation(views, scale, (score, keep))
    builder.call(attention_node(builder, AttentionPart.FORWARD, operation, blocks, results))
    made, logsumexp, largest = (builder.tensor_of(buffer) for buffer in results)
    return made, logsumexp, largest


# Where no kernel computes it, a CPU has PyTorch's own, some queries at a time.
LOWERINGS[flex_attention_by_chunks] = flex_attention


def check_operands(builder: Builder, operands: Sequence[Tensor]) -> None:
    """Raise CannotLower where the kernels do not compute attention of these tensors."""
    query, key, value = operands
    if len({x.dtype for x in operands}) > 1 or query.dtype not in _DTYPES:
        raise CannotLower("attention of mixed dtypes, or other than float16, bfloat16, float32")
    largest = _LARGEST_HEAD if builder.is_gpu else _LARGEST_CPU_HEAD
    for x in (query, value):
        size = x.shape[3]
        if not isinstance(size, int) or not 0 < size <= largest:
            raise CannotLower(f"attention with heads of size {size}")
    if ix.exact_div(query.shape[1], key.shape[1]) is None:
        raise CannotLower("the number of heads of keys does not divide that of queries")
    if any(size == 0 for x in operands for size in x.shape):
        raise CannotLower("attention of an empty tensor")
    if key.shape[0] != query.shape[0] and key.shape[0] != 1:
        raise CannotLower("attention of keys with another batch size")


def operand_views(builder: Builder, tensors: Sequence[Tensor], first: int = 0) -> tuple[View, ...]:
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
        if builder.is_gpu and block is not None and block % _SMALLEST_BLOCK:
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


@dataclass(frozen=True, slots=True)
class Operation:
    """The operands that all nodes of an op share."""

    views: tuple[View, ...]  # query, key, value
    scale: float
    functions: tuple[Expr, ...]  # score, mask, and the gradient of the score
    saved: Saved | None = None
    has_natural_sums: bool = False


def attention_node(
    builder: Builder, part: AttentionPart, operation: Operation, blocks: BlockMask,
    results: Sequence[Buffer],
) -> Attention:  # fmt: skip
    if not isinstance(operation.scale, int | float):
        raise CannotLower("attention with a scale that is not a number")
    query, key, value = operation.views
    score, mask, *gradient = operation.functions
    loads = [load.buffer for each in operation.functions for load in ex.loads_of(each)]
    names = [name for name in dict.fromkeys(loads) if name not in REGISTERS]
    whole = [builder.buffers[name] for name in names]
    return Attention(
        part=part,
        query=query,
        key=key,
        value=value,
        blocks=blocks,
        scale=float(operation.scale),
        score=score,
        mask=mask,
        results=tuple(buffer.name for buffer in results),
        captured=tuple(View(b.name, b.shape, b.strides) for b in whole),
        score_gradient=gradient[0] if gradient else None,
        saved=operation.saved,
        has_natural_sums=operation.has_natural_sums,
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
    check_operands(builder, operands)
    if grad_out is None:
        raise CannotLower("the gradient of its result is not given")
    if key.shape[0] != query.shape[0]:
        raise CannotLower("the gradient of keys that a batch shares")
    mask = _Mask.of(block_mask, builder.arguments[9])
    views = operand_views(builder, operands)
    sizes = (*query.shape[:3], key.shape[2])
    score, keep = _functions(builder, sizes, score_mod, score_buffers, mask.function, mask_buffers)
    gradient, scattered = _score_gradients(builder, joint, sizes, score_buffers)
    functions = (score, keep, gradient)
    saved = saved_for(builder, out, logsumexp, (grad_out, 5), grad_logsumexp)
    by_query = _blocks(builder, mask.keys, mask.query_block, mask.key_block)
    by_key = _blocks(builder, mask.queries, mask.key_block, mask.query_block)
    made = [gradient_of(builder, x, view) for x, view in zip(operands, views, strict=True)]
    sums = [None if each is None else _zeros(builder, each.shape) for each in scattered]
    places = _scatters(scattered, sums)
    operation = Operation(views, scale, functions, saved)
    node = attention_node(builder, AttentionPart.QUERY_GRADIENT, operation, by_query, made[:1])
    builder.call(_with_scatters(builder, node, places))
    builder.call(attention_node(builder, AttentionPart.KEY_GRADIENT, operation, by_key, made[1:]))
    of_query, of_key, of_value = (builder.tensor_of(buffer) for buffer in made)
    captured = [
        None if buffer is None else cast_tensor(builder.tensor_of(buffer), given.dtype)
        for buffer, given in zip(sums, score_buffers, strict=True)
    ]
    return of_query, of_key, of_value, tuple(captured)


def _zeros(builder: Builder, shape: Sequence[Dim]) -> Buffer:
    buffer = builder.new_buffer(DType.F32, shape)
    builder.store(Tensor(buffer.shape, DType.F32, ex.const(0.0, DType.F32)), buffer)
    return buffer


def _scatters(
    scattered: Sequence[Scattered | None], sums: Sequence[Buffer | None]
) -> list[ScoreScatter]:
    """The sums over scores at elements of captured tensors' gradients."""
    return [
        ScoreScatter(buffer.name, buffer.index(position), value)
        for each, buffer in zip(scattered, sums, strict=True)
        if each is not None and buffer is not None
        for position, value in each.parts
    ]


def _with_scatters(builder: Builder, node: Attention, places: Sequence[ScoreScatter]) -> Attention:
    """The node that also adds to the gradients of captured tensors."""
    if not places:
        return node
    values = [place.value for place in places]
    values += [atom.value for place in places for atom in ex.value_atoms(place.index)]
    names = dict.fromkeys(place.buffer for place in places)
    read = [*names, *(load.buffer for value in values for load in ex.loads_of(value))]
    known = {view.buffer for view in node.captured} | REGISTERS
    whole = [builder.buffers[name] for name in dict.fromkeys(read) if name not in known]
    more = tuple(View(b.name, b.shape, b.strides) for b in whole)
    return replace(
        node, captured=(*node.captured, *more), scatters=tuple(places), mutates=tuple(names)
    )


def gradient_of(builder: Builder, tensor: Tensor, view: View) -> Buffer:
    return builder.new_buffer(tensor.dtype, tensor.shape, _result_strides(tensor.shape, view))


def _score_gradients(
    builder: Builder, joint: Any, sizes: Sequence[Dim], score_buffers: Sequence[Any]
) -> tuple[Expr, list[Scattered | None]]:
    """The gradient of the score of a product, of that of the score that was exponentiated; and
    what is added to the gradient of each captured tensor."""
    given = Tensor((), DType.F32, SCORE_GRADIENT)
    args = [_SCORE, *_places(sizes), given, *score_buffers]
    first, *rest = _results(builder, joint, args)
    captured = rest[4:]
    if any(gradient is not None and not isinstance(gradient, Scattered) for gradient in rest):
        raise CannotLower("the gradient of a tensor that a score function reads without an index")
    # A score that does not depend on the product has no gradient.
    of_score = ex.const(0.0, DType.F32) if first is None else ex.cast(first.value, DType.F32)
    return of_score, captured


@lowers("flex_lib.zeros_and_scatter.default")
def zeros_and_scatter(
    builder: Builder, shape: Sequence[Dim], indices: Sequence[Tensor | None], value: Tensor
) -> Scattered:
    if len(indices) != len(shape) or value.ndim:
        raise CannotLower("the gradient of a tensor that a score function reads in part")
    if any(index is None or index.ndim for index in indices):
        raise CannotLower("the gradient of a tensor that a score function reads in part")
    position = tuple(
        data_index(index.value, size, wrap=True)  # type: ignore[union-attr]
        for index, size in zip(indices, shape, strict=True)
    )
    return Scattered(tuple(shape), ((position, ex.cast(value.value, DType.F32)),))


def saved_for(
    builder: Builder, out: Tensor, logsumexp: Tensor, grad_out: tuple[Tensor, int],
    grad_logsumexp: Tensor | None = None,
) -> Saved:  # fmt: skip
    """The gradient of each weight is what its value has with the gradient of the result, less
    the same number for all weights of a query: what is left keeps their sum at one.

    The gradient of the result comes with its place among the arguments.
    """
    given, place = grad_out
    products = multiply(builder, cast_tensor(out, DType.F32), cast_tensor(given, DType.F32))
    delta = builder.reduce(LoopKind.SUM, products, [3], DType.F32)
    if grad_logsumexp is not None:
        of_base_2 = multiply(builder, grad_logsumexp, -1.0 / math.log(2))
        delta = add(builder, delta, of_base_2)
    (gradient,) = operand_views(builder, [given], first=place)
    return Saved(gradient, builder.view_of(logsumexp), builder.view_of(delta))
