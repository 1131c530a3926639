"""scaled_dot_product_attention on a CPU: a generated kernel, or the library's if it is faster."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfuse.graph.attention_choice import AttentionProblem, library_reason
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.attention import CAUSAL, SCORE, SCORE_GRADIENT, WHOLE, AttentionPart, score_position
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer, contiguous_strides
from perfuse.lower.builder import Builder
from perfuse.lower.families.attention import (
    Operation,
    attention_node,
    check_operands,
    operand_views,
    saved_for,
)
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, expand, positions, reindex

# A mask that costs more is stored before it is added: each head of each sequence reads it again.
_MASK_COST, _MASK_LOADS = 4, 2


@lowers("aten._scaled_dot_product_flash_attention_for_cpu.default")
def attention(
    builder: Builder, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0,
    is_causal: bool = False, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    operands = (query, *_without_repeats(key, value))
    _check(builder, operands, dropout, has_mask=attn_mask is not None)
    sizes = (*query.shape[:3], key.shape[2])
    functions = (_score(builder, sizes, attn_mask), _keep(sizes, is_causal))
    views = operand_views(builder, operands)
    operation = Operation(views, _scale(query, scale), functions, has_natural_sums=True)
    out = _by_position(builder, query.dtype, (*query.shape[:3], value.shape[3]))
    sums, largest = (builder.new_buffer(DType.F32, query.shape[:3]) for _ in range(2))
    blocks = CAUSAL if is_causal else WHOLE
    results = (out, sums, largest)
    builder.call(attention_node(builder, AttentionPart.FORWARD, operation, blocks, results))
    return builder.tensor_of(out), builder.tensor_of(sums)


@lowers("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def attention_backward(
    builder: Builder, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
    logsumexp: Tensor, dropout: float, is_causal: bool, *, attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    operands = (query, key, value)
    _check(builder, operands, dropout, has_mask=attn_mask is not None, is_gradient=True)
    sizes = (*query.shape[:3], key.shape[2])
    functions = (_score(builder, sizes, attn_mask), _keep(sizes, is_causal), SCORE_GRADIENT)
    views = operand_views(builder, operands, first=1)
    saved = saved_for(builder, out, logsumexp, (grad_out, 0))
    operation = Operation(views, _scale(query, scale), functions, saved, has_natural_sums=True)
    made = [_by_position(builder, x.dtype, x.shape) for x in operands]
    blocks = CAUSAL if is_causal else WHOLE
    for part, results in (
        (AttentionPart.QUERY_GRADIENT, made[:1]),
        (AttentionPart.KEY_GRADIENT, made[1:]),
    ):
        builder.call(attention_node(builder, part, operation, blocks, results))
    of_query, of_key, of_value = (builder.tensor_of(buffer) for buffer in made)
    return of_query, of_key, of_value


def _check(
    builder: Builder, operands: Sequence[Tensor], dropout: float, *, has_mask: bool,
    is_gradient: bool = False,
) -> None:  # fmt: skip
    """Raise CannotLower where the library computes it."""
    if builder.is_gpu:  # a CPU's op, in a program that was captured without a GPU
        raise CannotLower("no lowering for this op")
    query = operands[0]
    problem = AttentionProblem(query.dtype is not DType.F32, has_mask, is_gradient, query.shape[2])
    reason = library_reason(builder.settings, builder.isa, problem)
    if reason is not None:
        raise CannotLower(reason)
    if dropout:
        raise CannotLower("attention with dropout")
    check_operands(builder, operands)


def _without_repeats(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with heads that were repeated for groups of queries there once.

    The kernel reads the head of a group, so that the copies are never stored.
    """
    for repeats in _repeats(key):
        once = [_once(x, repeats) for x in (key, value)]
        if once[0] is not None and once[1] is not None:
            return once[0], once[1]
    return key, value


def _repeats(x: Tensor) -> Sequence[Dim]:
    """The numbers of times that each head may be repeated, largest first."""
    head, heads = ix.as_atom(positions(x.shape)[1]), x.shape[1]
    if head is None:
        return []
    if head not in x.value.variables():
        return [heads]
    indices = [load.index for load in ex.loads_of(x.value)]
    divisors = {d.divisor for index in indices for d in ix.divisions_of(index)}
    return sorted((n for n in divisors if isinstance(n, int) and n > 1), reverse=True)


def _once(x: Tensor, repeats: Dim) -> Tensor | None:
    """The first head of each group of equal ones; None if they differ."""
    count = ix.exact_div(x.shape[1], repeats)
    if count is None:
        return None
    shape = (x.shape[0], count, *x.shape[2:])
    at, place = positions(shape), ix.var("repeat", repeats)
    made = reindex(x, shape, [at[0], ix.add(ix.mul(at[1], repeats), place), *at[2:]])
    return None if ix.as_atom(place) in made.value.variables() else made


def _scale(query: Tensor, scale: float | None) -> float:
    size = query.shape[3]
    assert isinstance(size, int), "checked before"
    return 1.0 / math.sqrt(size) if scale is None else scale


def _score(builder: Builder, sizes: Sequence[Dim], mask: Tensor | None) -> Expr:
    """The score with what the mask adds to it."""
    if mask is None:
        return SCORE
    if mask.value.cost > _MASK_COST or mask.value.num_loads > _MASK_LOADS:
        mask = builder.realize(mask)
    whole = expand(mask, sizes)
    at = score_position(_four(sizes))
    placed = reindex(whole, (), at)
    return ex.apply("add", SCORE, ex.cast(placed.value, DType.F32))


def _keep(sizes: Sequence[Dim], is_causal: bool) -> Expr:
    if not is_causal:
        return ex.const(True, DType.BOOL)
    _, _, query, key = score_position(_four(sizes))
    return ex.apply("ge", ex.index_value(query), ex.index_value(key))


def _four(sizes: Sequence[Dim]) -> tuple[Dim, Dim, Dim, Dim]:
    batch, heads, queries, keys = sizes
    return batch, heads, queries, keys


def _by_position(builder: Builder, dtype: DType, shape: Sequence[Dim]) -> Buffer:
    """A result with all heads of a position side by side, as the projection behind it reads it.

    Eager's has the layout of the queries, which is the same where a projection made them.
    """
    batch, heads, length, size = shape
    steps = contiguous_strides((batch, length, heads, size))
    return builder.new_buffer(dtype, tuple(shape), (steps[0], steps[2], steps[1], steps[3]))
