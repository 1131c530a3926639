"""Ops that address elements by their place in storage: as_strided and as_strided_scatter.

Their offsets count from the start of eager's storage, which tracing knows and our own memory does
not follow. So a place in storage becomes a position in the argument here, by index arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.lower.builder import Builder
from perfuse.lower.families.scattering import stored_at, updated
from perfuse.lower.families.views import guarded, inside, permute, reindex_unchecked, reshape
from perfuse.lower.layout import dense_order
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, cast_tensor, positions, reindex


@dataclass(frozen=True, slots=True)
class _Storage:
    """A tensor that covers its memory densely: its elements in memory order."""

    flat: Tensor
    strides: tuple[Dim, ...]
    start: Dim  # place of the first element in eager's storage

    def place(self, size: Sequence[Dim], stride: Sequence[Dim], offset: Any) -> Dim:
        """Position in `flat` of each element of such a window."""
        at: Dim = 0 if offset is None else ix.add(offset, ix.mul(self.start, -1))
        at = ix.add(at, ix.dot(positions(size), stride))
        if 0 not in size and not ix.is_within(at, self.flat.numel):
            raise CannotLower("as_strided reads outside its argument")
        return at


def _storage_of(builder: Builder, x: Tensor) -> _Storage:
    traced = builder.arguments[0] if builder.arguments else None
    if not isinstance(traced, torch.Tensor):
        raise CannotLower("as_strided of a tensor of unknown layout")
    strides = builder.symbols.strides(traced.stride())
    order = dense_order(x.shape, strides)
    if order is None:
        raise CannotLower("as_strided of a tensor with gaps")
    flat = reshape(builder, permute(builder, x, order) if x.ndim else x, [x.numel])
    return _Storage(flat, strides, builder.symbols.dim(traced.storage_offset()))


@lowers("aten.as_strided.default", "aten.as_strided_copy.default", "prims.as_strided.default")
def as_strided(
    builder: Builder, x: Tensor, size: Sequence[Dim], stride: Sequence[Dim], offset: Any = None
) -> Tensor:
    storage = _storage_of(builder, x)
    return reindex(storage.flat, size, [storage.place(size, stride, offset)])


@lowers("aten.as_strided_scatter.default", "prims.as_strided_scatter.default")
def as_strided_scatter(
    builder: Builder,
    x: Tensor,
    src: Tensor,
    size: Sequence[Dim],
    stride: Sequence[Dim],
    offset: Any = None,
) -> Tensor:
    """x with the elements of a window taken from `src`."""
    if 0 in size:
        return x
    if any(step == 0 and n != 1 for step, n in zip(stride, size, strict=True)):
        raise CannotLower("as_strided_scatter into elements that share memory")
    storage = _storage_of(builder, x)
    place = storage.place(size, stride, offset)
    values = cast_tensor(src, x.dtype)
    if updated(builder, storage.flat, [(values, [place])]):
        return x
    made = _written(storage.flat, values, stride, place)
    if made is None:
        made = stored_at(builder, storage.flat, [(values, [place])], accumulate=False)
    return reindex(made, x.shape, [ix.dot(positions(x.shape), storage.strides)])


def _written(flat: Tensor, values: Tensor, stride: Sequence[Dim], place: Dim) -> Tensor | None:
    """The memory afterwards as one formula; None where positions have no simple inverse."""
    first = ix.add(place, ix.mul(ix.dot(positions(values.shape), stride), -1))
    at = ix.add(positions(flat.shape)[0], ix.mul(first, -1))
    order = dense_order(values.shape, tuple(stride))
    if order is not None and first == 0 and values.numel == flat.numel:
        source = [ix.mod(ix.floordiv(at, s), n) for s, n in zip(stride, values.shape, strict=True)]
        return reindex(values, flat.shape, source)
    found = _inverse(at, values.shape, stride)
    if found is None:
        return None
    source, mask = found
    inner = reindex_unchecked(values, flat.shape, source)
    return Tensor(flat.shape, flat.dtype, guarded(inner.value, mask, flat.value))


def _inverse(at: Dim, size: Sequence[Dim], stride: Sequence[Dim]) -> tuple[list[Dim], Expr] | None:
    """Which element of a window is at this place, and whether one is.

    Axis by axis from the widest stride inwards, as long as each steps over all that is inside.
    """
    if not all(isinstance(n, int) for n in (*size, *stride)):
        return None
    known = [(int(s), int(n), d) for d, (n, s) in enumerate(zip(size, stride, strict=True))]  # type: ignore[arg-type]
    axes = sorted((axis for axis in known if axis[1] != 1), reverse=True)
    source: list[Dim] = [0] * len(size)
    mask = ex.const(True, DType.BOOL)
    for k, (step, count, d) in enumerate(axes):
        if step <= sum((n - 1) * s for s, n, _ in axes[k + 1 :]):
            return None
        source[d] = ix.floordiv(at, step)
        mask = ex.apply("land", mask, inside(source[d], count))
        at = ix.mod(at, step)
    if at != 0:
        rest = ex.apply("eq", ex.index_value(at), ex.const(0, DType.I64))
        mask = ex.apply("land", mask, rest)
    return source, mask
