"""Nearest-neighbour resampling: by whole factors a quotient in the index, a sum in the gradient."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.lower.builder import Builder
from perfuse.lower.families.indexing import looked_up
from perfuse.lower.families.reductions import sum_over
from perfuse.lower.families.views import reshape
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, positions


def _source(at: Dim, size: Any, out: Any, scale: float | None, *, exact: bool) -> Dim:
    """The input position that an output position shows."""
    try:
        return ix.floordiv(at, _whole_factor(size, out, scale, exact=exact))
    except CannotLower:
        if not (isinstance(size, int) and isinstance(out, int)):
            raise
    ratio = ex.cast(ex.const(size / out if scale is None else 1 / scale, DType.F64), DType.F32)
    step = ex.cast(ex.index_value(at), DType.F32)
    if exact:
        step = ex.apply("add", step, ex.const(0.5, DType.F32))
    position = ex.cast(ex.apply("mul", step, ratio), DType.I64)
    return ix.indirect(ex.apply("min", position, ex.const(size - 1, DType.I64)), size)


def _whole_factor(size: Any, out: Any, scale: float | None, *, exact: bool) -> int:
    """out // size, if eager's float arithmetic picks just these sources."""
    if not (isinstance(size, int) and isinstance(out, int)) or size == 0 or out % size:
        raise CannotLower("resampling by a fractional factor")
    ratio = _as_float32(size / out if scale is None else 1 / scale)
    shift, factor = (0.5 if exact else 0.0), out // size
    sources = (min(int(_as_float32((at + shift) * ratio)), size - 1) for at in range(out))
    if any(source != at // factor for at, source in enumerate(sources)):
        raise CannotLower("resampling whose index rounding is not an integer quotient")
    return out // size


def _as_float32(x: float) -> float:
    """Rounded as eager's arithmetic is. Not by tensors: where this is traced, they have no data."""
    return ctypes.c_float(x).value


def _factors(
    sizes: Sequence[Dim], outs: Sequence[Dim], scales: Sequence[float | None], *, exact: bool
) -> list[int]:
    padded = [*scales, *[None] * (len(sizes) - len(scales))]
    return [
        _whole_factor(n, o, s, exact=exact) for n, o, s in zip(sizes, outs, padded, strict=True)
    ]


def _nearest(ndim: int, *, exact: bool) -> Callable[..., Tensor]:
    def lower(builder: Builder, x: Tensor, outs: Sequence[Dim], *scales: float | None) -> Tensor:
        padded = [*scales, *[None] * (ndim - len(scales))]
        shape = (*x.shape[:-ndim], *outs)
        at = positions(shape)
        rows = zip(at[-ndim:], x.shape[-ndim:], outs, padded, strict=True)
        behind = [_source(*row, exact=exact) for row in rows]
        return looked_up(builder, x, shape, [*at[:-ndim], *behind])

    return lower


def _nearest_backward(ndim: int, *, exact: bool) -> Callable[..., Tensor]:
    def lower(
        builder: Builder, grad: Tensor, outs: Sequence[Dim], size: Sequence[Dim], *scales: Any
    ) -> Tensor:
        factors = _factors(size[-ndim:], outs, scales, exact=exact)
        parted: list[Dim] = list(size[:-ndim])
        for n, factor in zip(size[-ndim:], factors, strict=True):
            parted += [n, factor]
        lead = len(size) - ndim
        windows = reshape(builder, grad, parted)
        return sum_over(builder, windows, [lead + 2 * d + 1 for d in range(ndim)])

    return lower


for _ndim in (1, 2, 3):
    for _name, _exact in (("upsample_nearest", False), ("_upsample_nearest_exact", True)):
        lowers(f"aten.{_name}{_ndim}d.default")(_nearest(_ndim, exact=_exact))
        lowers(f"aten.{_name}{_ndim}d_backward.default")(_nearest_backward(_ndim, exact=_exact))
