"""Creation ops: full, arange, eye and similar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType, from_torch
from perfuse.ir.index import Dim, Index
from perfuse.lower.builder import Builder
from perfuse.lower.families.pointwise import element
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, positions
from perfuse.torch_compat.tensors import overlaps


def requested_dtype(dtype: Any, default: torch.dtype | DType) -> DType:
    wanted = default if dtype is None else dtype
    found = wanted if isinstance(wanted, DType) else from_torch(wanted)
    if found is None:
        raise CannotLower(f"dtype {dtype}")
    return found


def _filled(shape: Sequence[Dim], dtype: DType, value: Any) -> Tensor:
    return Tensor(tuple(shape), dtype, ex.round_to(element(value, dtype.compute), dtype))


def _dtype_of_scalar(value: Any) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int | Index) else torch.get_default_dtype()


@lowers("aten.full.default")
def full(builder: Builder, size: Sequence[Dim], value: Any, dtype: Any = None, **kw: Any) -> Tensor:
    return _filled(size, requested_dtype(dtype, _dtype_of_scalar(value)), value)


@lowers("aten.scalar_tensor.default")
def scalar_tensor(builder: Builder, value: Any, dtype: Any = None, **kw: Any) -> Tensor:
    return full(builder, (), value, dtype or torch.get_default_dtype())


@lowers("aten.fill.Scalar", "aten.full_like.default")
def full_like(builder: Builder, x: Tensor, value: Any, dtype: Any = None, **kw: Any) -> Tensor:
    return _filled(x.shape, requested_dtype(dtype, x.dtype), value)


@lowers("aten.new_full.default")
def new_full(
    builder: Builder, x: Tensor, size: Sequence[Dim], value: Any, dtype: Any = None, **kw: Any
) -> Tensor:
    return _filled(size, requested_dtype(dtype, x.dtype), value)


def _repeated(number: int) -> Callable[..., Tensor]:
    """One number in a given size, or in the size and dtype of a tensor unless others are given."""

    def lower(
        builder: Builder, like: Any, size: Any = None, dtype: Any = None, **kw: Any
    ) -> Tensor:
        if not isinstance(like, Tensor):
            shape, chosen = like, requested_dtype(dtype, torch.get_default_dtype())
        else:
            shape = like.shape if size is None else size
            chosen = requested_dtype(dtype, like.dtype)
        return Tensor(tuple(shape), chosen, ex.const(number, chosen.compute))

    return lower


zeros = _repeated(0)
lowers("aten.zeros.default", "aten.new_zeros.default", "aten.zeros_like.default")(zeros)
lowers("aten.empty.memory_format", "aten.new_empty.default", "aten.empty_like.default")(zeros)
lowers("aten.empty_permuted.default")(zeros)
lowers("aten.ones.default", "aten.new_ones.default", "aten.ones_like.default")(_repeated(1))


@lowers("aten.empty_strided.default", "aten.new_empty_strided.default")
def empty_strided(builder: Builder, *args: Any, dtype: Any = None, **kw: Any) -> Tensor:
    size, strides = args[-2:]
    if not all(isinstance(n, int) for n in (*size, *strides)) or overlaps(size, strides):
        raise CannotLower("elements may overlap in memory")
    return zeros(builder, *args[:-1], dtype=dtype)


@lowers("aten.arange.start_step", "prims.iota.default")
def arange(builder: Builder, start: Any, *rest: Any, dtype: Any = None, **kw: Any) -> Tensor:
    if "start" in kw:  # prims.iota(length, *, start, step, dtype, ...)
        length, start, step = start, kw["start"], kw["step"]
    else:
        end, step = rest[0], rest[1] if len(rest) > 1 else kw.get("step", 1)
        if not all(isinstance(v, int | float) for v in (start, end, step)):
            raise CannotLower("arange with dynamic bounds")
        length = max(-int((start - end) // step), 0)
    plain = all(isinstance(v, int | Index) for v in (start, step))
    chosen = requested_dtype(dtype, torch.int64 if plain else torch.get_default_dtype())
    (at,) = positions((length,))
    if plain:
        value = ex.cast(ex.index_value(at * step + start), chosen)
    else:
        wide = DType.F64
        stepped = ex.apply("mul", ex.cast(ex.index_value(at), wide), element(float(step), wide))
        value = ex.cast(ex.apply("add", stepped, element(float(start), wide)), chosen)
    return Tensor((length,), chosen, ex.round_to(value, chosen))


@lowers("aten.eye.m", "aten.eye.default")
def eye(builder: Builder, rows: Dim, cols: Any = None, dtype: Any = None, **kw: Any) -> Tensor:
    shape = (rows, rows if cols is None else cols)
    chosen = requested_dtype(dtype, torch.get_default_dtype())
    at = positions(shape)
    same = ex.apply("eq", ex.index_value(at[0]), ex.index_value(at[1]))
    return Tensor(shape, chosen, ex.cast(same, chosen))
