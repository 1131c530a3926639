"""Stores at positions: scatter, index_put, the gradient of embedding, writes into views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.ir.program import Loop, LoopKind, View, sizes_from_data
from perfuse.lower.builder import Builder, axes_over, unsqueeze_dims
from perfuse.lower.families.indexing import checked_index, data_index, places_of
from perfuse.lower.families.pointwise import element
from perfuse.lower.families.views import (
    clamp_slice,
    guarded,
    inside,
    place_along,
    reindex_unchecked,
)
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, cast_tensor, expand, positions, reindex

Stores = Sequence[tuple[Tensor, Sequence[Dim]]]  # values, and the position of each


def stored_at(builder: Builder, x: Tensor, stores: Stores, *, accumulate: bool) -> Tensor:
    """x with values written to (or added at) positions, later stores after earlier.

    The last store alone accumulates. Sums into small floats are kept in float32 until the end. All
    is done in a copy of x, unless that may be overwritten.
    """
    if accumulate and x.dtype is DType.BOOL:
        raise CannotLower("scatter-add of bools")
    if updated(builder, x, stores, accumulate=accumulate):
        return x
    held = cast_tensor(x, x.dtype.compute) if accumulate else x
    target = builder.realize_copy(held)
    view = builder.memory_of(target)
    builder.nodes += _loops(builder, view, stores, accumulate=accumulate)
    return cast_tensor(target, x.dtype)


def updated(builder: Builder, x: Tensor, stores: Stores, *, accumulate: bool = False) -> bool:
    """Whether the values were stored into x itself, which the op in hand may overwrite."""
    name, view = builder.overwritable, builder.window_on(x)
    if name is None or view is None or view.buffer != name:
        return False
    if accumulate and x.dtype.compute is not x.dtype:
        return False
    indices = [_index(view, position) for _, position in stores]
    if any(_reads(name, atom.value) for index in indices for atom in ex.value_atoms(index)):
        return False
    kept = [
        (_read_before(builder, name, values, None if accumulate else index), position)
        for (values, position), index in zip(stores, indices, strict=True)
    ]
    builder.overwrite(_loops(builder, view, kept, accumulate=accumulate))
    return True


def _read_before(builder: Builder, name: str, values: Tensor, index: Dim | None) -> Tensor:
    """Values that read the buffer they are stored into, elsewhere than at `index`, in memory."""
    reads = [read for read in ex.loads_of(values.value) if read.buffer == name]
    is_here = index is not None and not ex.value_atoms(index)
    if all(is_here and read.index is index for read in reads):
        return values
    return builder.realize_copy(values)


def _reads(name: str, value: ex.Expr) -> bool:
    return any(read.buffer == name for read in ex.loads_of(value))


def _index(view: View, position: Sequence[Dim]) -> Dim:
    return ix.add(view.offset, ix.dot(position, view.strides))


def _loops(builder: Builder, view: View, stores: Stores, *, accumulate: bool) -> list[Loop]:
    """The loops that store values into a window; none for those that are there already."""
    buffer = builder.buffers[view.buffer]
    loops = []
    for i, (values, position) in enumerate(stores):
        accumulates = accumulate and i == len(stores) - 1
        kind = LoopKind.SCATTER_ADD if accumulates else LoopKind.MAP
        value, index = ex.cast(values.value, buffer.dtype), _index(view, position)
        is_there = value is ex.load(buffer.name, index, buffer.dtype) and not accumulates
        if not is_there and not any(size == 0 for size in values.shape):
            axes = axes_over(values.shape)
            loops.append(Loop(buffer.name, axes, kind, value, index, builder.origin))
    return loops


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
    first, last = clamp_slice(start, end, x.shape[dim], src.shape[dim] if step == 1 else None)
    src = expand(cast_tensor(src, x.dtype), [*src.shape])
    if any(size == 0 for size in src.shape):
        return x
    place = list(positions(src.shape))
    place[dim] = ix.add(first, ix.mul(place[dim], step))
    if updated(builder, x, [(src, place)]):
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
    index = place_along(builder, index, x.shape[dim])
    at = positions(src.shape)
    is_safe = ix.is_nonnegative(index) and not sizes_from_data([index])
    if is_safe and updated(
        builder, x, [(cast_tensor(src, x.dtype), [*at[:dim], index, *at[dim:]])]
    ):
        return x
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
    if updated(builder, x, [(cast_tensor(src, x.dtype), _diagonal(src, x.ndim, (a, b), offset))]):
        return x
    at = positions(x.shape)
    along = ix.add(at[a], -max(-offset, 0))
    other = ix.add(at[b], -max(offset, 0))
    mask = ex.apply("eq", ex.index_value(along), ex.index_value(other))
    mask = ex.apply("land", mask, inside(along, src.shape[-1]))
    rest = [at[d] for d in range(x.ndim) if d not in (a, b)]
    return _where_inside(x, cast_tensor(src, x.dtype), [*rest, along], mask)


def _diagonal(src: Tensor, ndim: int, dims: tuple[int, int], offset: int) -> list[Dim]:
    """Where in a tensor the elements of its diagonal are."""
    *rest, along = positions(src.shape)
    outer = iter(rest)
    down, across = ix.add(along, max(-offset, 0)), ix.add(along, max(offset, 0))
    return [down if d == dims[0] else across if d == dims[1] else next(outer) for d in range(ndim)]
