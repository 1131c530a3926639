"""Loads at data-dependent positions: gather, index, embedding and similar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.lower.builder import Builder
from perfuse.lower.families.views import reshape
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, broadcast_shapes, expand, positions, reindex

# A costlier formula is computed once before it is looked up by position, unless few of its elements
# are: a loss looks up one of a row's log-probabilities, and storing them all is a second logits.
_CHEAP_SOURCE_COST, _CHEAP_INDEX_COST = 2, 16
_FEW = 8  # at most one element in this many


def as_dim(value: Expr) -> Dim | None:
    """A 64-bit value as plain index arithmetic, when it is made of nothing else."""
    if value.op == "const":
        return int(value.attr)
    if value.op == "index":
        found: Dim = value.attr
        return found
    if value.op not in ("add", "sub", "mul", "floordiv", "mod", "fmod", "truncdiv"):
        return None
    if value.dtype is not DType.I64:
        return None
    a, b = (as_dim(arg) for arg in value.args)
    if a is None or b is None:
        return None
    if value.op == "add":
        return ix.add(a, b)
    if value.op == "sub":
        return ix.add(a, ix.mul(b, -1))
    if value.op == "mul":
        return ix.mul(a, b)
    if not isinstance(b, int) or b <= 0:
        return None
    if value.op in ("fmod", "truncdiv") and not ix.is_nonnegative(ix.bounds(a)[0]):
        return None
    return ix.floordiv(a, b) if value.op in ("floordiv", "truncdiv") else ix.mod(a, b)


def data_index(value: Expr, size: Dim, *, wrap: bool) -> Dim:
    """A position read from data; `wrap` counts negative ones from the end, as Python does."""
    value = ex.cast(value, DType.I64)
    known = as_dim(value)
    if known is not None and ix.is_within(known, size):
        return known
    if wrap:
        negative = ex.apply("lt", value, ex.const(0, DType.I64))
        from_end = ex.apply("add", value, ex.index_value(size))
        value = ex.apply("where", negative, from_end, value)
    return ix.indirect(value, size)


def checked_index(builder: Builder, index: Tensor) -> Tensor:
    """An index tensor in the form that another tensor's index can contain."""
    if not index.dtype.is_int or index.dtype is DType.U8:
        raise CannotLower(f"index of dtype {index.dtype}")
    return builder.realize(index) if index.value.cost > _CHEAP_INDEX_COST else index


def looked_up(builder: Builder, x: Tensor, shape: Sequence[Dim], source: Sequence[Dim]) -> Tensor:
    """x at positions that may be data, computed beforehand unless it is cheap."""
    if any(size == 0 for size in shape):
        return Tensor(tuple(shape), x.dtype, ex.const(0, x.dtype))
    if x.value.cost > _CHEAP_SOURCE_COST and not _are_few(shape, x.shape):
        x = builder.realize(x)
    return reindex(x, shape, source)


def _are_few(wanted: Sequence[Dim], given: Sequence[Dim]) -> bool:
    return ix.is_nonnegative(ix.add(ix.product([*given]), ix.mul(ix.product([*wanted]), -_FEW)))


@lowers("aten.gather.default")
def gather(
    builder: Builder, x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False
) -> Tensor:
    index = checked_index(builder, index)
    if x.ndim == 0:
        return expand(x, index.shape)
    if index.ndim != x.ndim:
        raise CannotLower("gather with an index of different rank")
    source = list(positions(index.shape))
    source[dim] = data_index(index.value, x.shape[dim], wrap=False)
    return looked_up(builder, x, index.shape, source)


@lowers("aten.index_select.default")
def index_select(builder: Builder, x: Tensor, dim: int, index: Tensor) -> Tensor:
    index = checked_index(builder, index)
    if x.ndim == 0:
        return x
    dim %= x.ndim
    flat = reshape(builder, index, [index.numel])
    shape = list(x.shape)
    shape[dim] = index.numel
    source = list(positions(shape))
    placed = reindex(flat, shape, [source[dim]])
    source[dim] = data_index(placed.value, x.shape[dim], wrap=False)
    return looked_up(builder, x, shape, source)


@lowers("aten.take.default")
def take(builder: Builder, x: Tensor, index: Tensor) -> Tensor:
    index = checked_index(builder, index)
    flat = reshape(builder, x, [x.numel])
    at = data_index(index.value, x.numel, wrap=True)
    return looked_up(builder, flat, index.shape, [at])


@lowers("aten.embedding.default")
def embedding(
    builder: Builder, weight: Tensor, indices: Tensor, padding_idx: int = -1, *flags: Any
) -> Tensor:
    indices = checked_index(builder, indices)
    shape = (*indices.shape, *weight.shape[1:])
    at = positions(shape)
    placed = reindex(indices, shape, at[: indices.ndim])
    row = data_index(placed.value, weight.shape[0], wrap=False)
    return looked_up(builder, weight, shape, [row, *at[indices.ndim :]])


@dataclass(frozen=True, slots=True)
class Places:
    """The elements that an expression such as x[:, i, j] selects: a shape, and indices into x."""

    shape: tuple[Dim, ...]
    source: tuple[Dim, ...]


def places_of(builder: Builder, x: Tensor, indices: Sequence[Tensor | None]) -> Places:
    """Resolve index tensors by NumPy's rules: joined in place if adjacent, else in front."""
    entries = [*indices, *[None] * (x.ndim - len(indices))]
    used = [d for d, entry in enumerate(entries) if entry is not None]
    if not used:
        return Places(x.shape, positions(x.shape))
    if any(x.shape[d] == 0 for d in used):
        raise CannotLower("index into an empty dimension")
    tensors = {d: checked_index(builder, t) for d, t in enumerate(entries) if t is not None}
    joined = broadcast_shapes(*(t.shape for t in tensors.values()))
    adjacent = used == list(range(used[0], used[-1] + 1))
    lead = used[0] if adjacent else 0
    rest = [d for d in range(x.ndim) if d not in tensors]
    before, after = rest[:lead], rest[lead:]
    shape = (*(x.shape[d] for d in before), *joined, *(x.shape[d] for d in after))
    at = positions(shape)
    within = at[lead : lead + len(joined)]
    source: list[Dim] = [0] * x.ndim
    for d, position in zip(rest, (*at[:lead], *at[lead + len(joined) :]), strict=True):
        source[d] = position
    for d, tensor in tensors.items():
        placed = reindex(expand(tensor, joined), shape, within)
        source[d] = data_index(placed.value, x.shape[d], wrap=True)
    return Places(shape, tuple(source))


@lowers("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index_tensor(builder: Builder, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    places = places_of(builder, x, indices)
    return looked_up(builder, x, places.shape, places.source)
