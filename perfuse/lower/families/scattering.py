"""Stores at positions: scatter, index_put, the gradient of embedding, writes into views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.ir.program import Loop, LoopKind
from perfuse.lower.builder import Builder, axes_over, unsqueeze_dims
from perfuse.lower.families.indexing import checked_index, data_index, places_of
from perfuse.lower.families.pointwise import element
from perfuse.lower.families.views import clamp_slice, guarded, inside, reindex_unchecked
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, cast_tensor, expand, positions, reindex


def stored_at(
    builder: Builder, x: Tensor, stores: Sequence[tuple[Tensor, Sequence[Dim]]], *, accumulate: bool
) -> Tensor:
    """A copy of x with values written to (or added at) positions, later stores after earlier.

    The last store alone accumulates. Sums into small floats are kept in float32 until the end.
    """
    if accumulate and x.dtype is DType.BOOL:
        raise CannotLower("scatter-add of bools")
    held = cast_tensor(x, x.dtype.compute) if accumulate else x
    target = builder.realize_copy(held)
    buffer = builder.buffers[target.value.buffer]
    for i, (values, position) in enumerate(stores):
        if any(size == 0 for size in values.shape):
            continue
        axes = axes_over(values.shape)
        accumulates = accumulate and i == len(stores) - 1
        kind = LoopKind.SCATTER_ADD if accumulates else LoopKind.MAP
        value = ex.cast(values.value, buffer.dtype)
        index = buffer.index(tuple(position))
        builder.nodes.append(Loop(buffer.name, axes, kind, value, index, builder.origin))
    return cast_tensor(target, x.dtype)


def _as_row(x: Tensor) -> Tensor:
    return unsqueeze_dims(x, [0]) if x.ndim == 0 else x


def _scatter(
    builder: Builder, x: Tensor, dim: int, index: Tensor, src: Any, *, accumulate: bool
) -> Tensor:
    places = _scatter_places(builder, x, dim, index)
    values = _values(src, index, x.dtype)
    return _like(stored_at(builder, _as_row(x), [(values, places)], accumulate=accumulate), x)


def _scatter_places(builder: Builder, x: Tensor, dim: int, index: Tensor) -> list[Dim]:
    row, index = _as_row(x), _as_row(checked_index(builder, index))
    if index.ndim != row.ndim:
        raise CannotLower("scatter with an index of different rank")
    places = list(positions(index.shape))
    places[dim] = data_index(index.value, row.shape[dim], wrap=False)
    return places


def _values(src: Any, index: Tensor, dtype: DType) -> Tensor:
    """The values of a scatter over the index's shape: a corner of `src`, or a repeated scalar."""
    shape = _as_row(index).shape
    if isinstance(src, Tensor):
        return reindex(_as_row(src), shape, positions(shape))
    return Tensor(shape, dtype, element(src, dtype.compute))


def _like(result: Tensor, x: Tensor) -> Tensor:
    return reindex(result, (), [0]) if x.ndim == 0 else result


@lowers("aten.scatter.src", "aten.scatter.value")
def scatter(builder: Builder, x: Tensor, dim: int, index: Tensor, src: Any) -> Tensor:
    return _scatter(builder, x, dim, index, src, accumulate=False)


@lowers("aten.scatter_add.default")
def scatter_add(builder: Builder, x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _scatter(builder, x, dim, index, src, accumulate=True)


@lowers("aten.scatter.reduce", "aten.scatter.value_reduce")
def scatter_reduced(
    builder: Builder, x: Tensor, dim: int, index: Tensor, src: Any, *, reduce: str
) -> Tensor:
    if reduce != "add":
        raise CannotLower(f"scatter with reduction {reduce}")
    return _scatter(builder, x, dim, index, src, accumulate=True)


@lowers("aten.scatter_reduce.two")
def scatter_reduce(
    builder: Builder,
    x: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    if reduce != "sum":
        raise CannotLower(f"scatter with reduction {reduce}")
    if include_self:
        return _scatter(builder, x, dim, index, src, accumulate=True)
    places = _scatter_places(builder, x, dim, index)
    stores = [(_values(value, index, x.dtype), places) for value in (0, src)]
    return _like(stored_at(builder, _as_row(x), stores, accumulate=True), x)


@lowers("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(
    builder: Builder,
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
) -> Tensor:
    first = indices[0]
    if len(indices) == 1 and first is not None and first.dtype is DType.BOOL:
        return _masked_put(builder, x, first, values, accumulate=accumulate)
    if any(size == 0 for size in x.shape):
        raise CannotLower("index_put into an empty tensor")
    places = places_of(builder, x, indices)
    spread = builder.broadcast(cast_tensor(values, x.dtype), places.shape)
    return stored_at(builder, x, [(spread, places.source)], accumulate=accumulate)


def _masked_put(
    builder: Builder, x: Tensor, mask: Tensor, values: Tensor, *, accumulate: bool
) -> Tensor:
    """x[mask] = one value for all of its places."""
    if accumulate or values.numel != 1:
        raise CannotLower("index_put of several values through a mask")
    at = positions(x.shape)
    held = reindex(mask, x.shape, at[: mask.ndim])
    value = expand(cast_tensor(reindex(values, (), [0] * values.ndim), x.dtype), x.shape)
    return Tensor(x.shape, x.dtype, ex.apply("where", held.value, value.value, x.value))


@lowers("aten.embedding_dense_backward.default")
def embedding_dense_backward(
    builder: Builder,
    grad: Tensor,
    indices: Tensor,
    num_weights: Dim,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    if scale_grad_by_freq:
        raise CannotLower("embedding gradient scaled by frequency")
    indices = checked_index(builder, indices)
    at = positions(grad.shape)
    row = reindex(indices, grad.shape, at[: indices.ndim])
    value = grad.value
    if padding_idx >= 0:
        kept = ex.apply("ne", row.value, ex.const(padding_idx, row.value.dtype))
        value = ex.apply("where", kept, value, ex.const(0, value.dtype))
    width = grad.shape[-1]
    empty = Tensor((num_weights, width), grad.dtype, ex.const(0, grad.dtype))
    position = [data_index(row.value, num_weights, wrap=False), at[-1]]
    values = Tensor(grad.shape, grad.dtype, value)
    return stored_at(builder, empty, [(values, position)], accumulate=True)


def refuse_overlap(builder: Builder) -> None:
    """Elements that share memory change together: ATen copies `x` with its strides for these.

    Not where an element is repeated (a stride of 0): it copies such a tensor densely.
    """
    traced = builder.arguments[0]
    pairs = zip(
        builder.symbols.strides(traced.stride()), builder.symbols.dims(traced.shape), strict=True
    )
    strides = [stride for stride, size in pairs if size != 1]
    if 0 not in strides and len(set(strides)) < len(strides):
        raise CannotLower("elements of the tensor share memory")


@lowers("aten.slice_scatter.default")
def slice_scatter(
    builder: Builder,
    x: Tensor,
    src: Tensor,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Tensor:
    """x with a slice taken from `src`: one formula, so that neither is copied first."""
    refuse_overlap(builder)
    dim %= x.ndim
    first, last = clamp_slice(start, end, x.shape[dim])
    src = expand(cast_tensor(src, x.dtype), [*src.shape])
    if any(size == 0 for size in src.shape):
        return x
    source = list(positions(x.shape))
    offset = ix.add(source[dim], ix.mul(first, -1))
    span = ix.add(last, ix.mul(first, -1))
    mask = inside(offset, span)
    if step != 1:
        remainder = ex.index_value(ix.mod(offset, step))
        mask = ex.apply("land", mask, ex.apply("eq", remainder, ex.const(0, DType.I64)))
    source[dim] = ix.floordiv(offset, step)
    return _where_inside(x, src, source, mask)


def _where_inside(x: Tensor, src: Tensor, source: Sequence[Dim], mask: ex.Expr) -> Tensor:
    inner = reindex_unchecked(src, x.shape, source)
    return Tensor(x.shape, x.dtype, guarded(inner.value, mask, x.value))


@lowers("aten.select_scatter.default")
def select_scatter(builder: Builder, x: Tensor, src: Tensor, dim: int, index: Any) -> Tensor:
    refuse_overlap(builder)
    dim %= x.ndim
    if isinstance(index, int) and index < 0:
        index = ix.add(index, x.shape[dim])
    source = list(positions(x.shape))
    mask = ex.apply("eq", ex.index_value(source[dim]), ex.index_value(index))
    inner = reindex(cast_tensor(src, x.dtype), x.shape, source[:dim] + source[dim + 1 :])
    return Tensor(x.shape, x.dtype, ex.apply("where", mask, inner.value, x.value))


@lowers("aten.diagonal_scatter.default")
def diagonal_scatter(
    builder: Builder, x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    refuse_overlap(builder)
    a, b = dim1 % x.ndim, dim2 % x.ndim
    if any(size == 0 for size in src.shape):
        return x
    at = positions(x.shape)
    along = ix.add(at[a], -max(-offset, 0))
    other = ix.add(at[b], -max(offset, 0))
    mask = ex.apply("eq", ex.index_value(along), ex.index_value(other))
    mask = ex.apply("land", mask, inside(along, src.shape[-1]))
    rest = [at[d] for d in range(x.ndim) if d not in (a, b)]
    return _where_inside(x, cast_tensor(src, x.dtype), [*rest, along], mask)
