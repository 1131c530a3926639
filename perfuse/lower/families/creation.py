"""Creation ops: full, arange, eye and similar."""

from __future__ import annotations

from collections.abc import Sequence
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


def requested_dtype(dtype: Any, default: torch.dtype) -> DType:
    found = from_torch(default if dtype is None else dtype)
    if found is None:
        raise CannotLower(f"dtype {dtype}")
    return found


def _dtype_of_scalar(value: Any) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int | Index) else torch.get_default_dtype()


@lowers("aten.full.default")
def full(builder: Builder, size: Sequence[Dim], value: Any, dtype: Any = None, **kw: Any) -> Tensor:
    chosen = requested_dtype(dtype, _dtype_of_scalar(value))
    if isinstance(value, float) and chosen is DType.BOOL:
        value = bool(value)
    return Tensor(tuple(size), chosen, ex.round_to(element(value, chosen.compute), chosen))


@lowers("aten.scalar_tensor.default")
def scalar_tensor(builder: Builder, value: Any, dtype: Any = None, **kw: Any) -> Tensor:
    if dtype is None:
        dtype = torch.get_default_dtype()
    return full(builder, (), value, dtype)


@lowers("aten.zeros.default", "aten.new_zeros.default")
def zeros(builder: Builder, first: Any, size: Any = None, dtype: Any = None, **kw: Any) -> Tensor:
    like = first if isinstance(first, Tensor) else None
    shape = size if like is not None else first
    chosen = (
        like.dtype
        if like is not None and dtype is None
        else requested_dtype(dtype, torch.get_default_dtype())
    )
    return Tensor(tuple(shape), chosen, ex.const(0, chosen.compute))


@lowers("aten.ones.default", "aten.new_ones.default")
def ones(builder: Builder, first: Any, size: Any = None, dtype: Any = None, **kw: Any) -> Tensor:
    made = zeros(builder, first, size, dtype)
    return Tensor(made.shape, made.dtype, ex.const(1, made.dtype.compute))


@lowers("aten.zeros_like.default", "aten.empty_like.default")
def zeros_like(builder: Builder, x: Tensor, dtype: Any = None, **kw: Any) -> Tensor:
    chosen = x.dtype if dtype is None else requested_dtype(dtype, torch.float32)
    return Tensor(x.shape, chosen, ex.const(0, chosen.compute))


@lowers("aten.ones_like.default")
def ones_like(builder: Builder, x: Tensor, dtype: Any = None, **kw: Any) -> Tensor:
    chosen = x.dtype if dtype is None else requested_dtype(dtype, torch.float32)
    return Tensor(x.shape, chosen, ex.const(1, chosen.compute))


@lowers("aten.empty.memory_format", "aten.new_empty.default",
        "aten.empty_permuted.default")  # fmt: skip
def empty(builder: Builder, first: Any, *rest: Any, dtype: Any = None, **kw: Any) -> Tensor:
    if isinstance(first, Tensor):
        return zeros(builder, first, rest[0], dtype)
    return zeros(builder, first, None, dtype)


@lowers("aten.empty_strided.default", "aten.new_empty_strided.default")
def empty_strided(builder: Builder, *args: Any, dtype: Any = None, **kw: Any) -> Tensor:
    size, strides = args[-2:]
    if not all(isinstance(n, int) for n in (*size, *strides)) or overlaps(size, strides):
        raise CannotLower("elements may overlap in memory")
    return empty(builder, *args, dtype=dtype)


@lowers("aten.new_full.default")
def new_full(
    builder: Builder, x: Tensor, size: Sequence[Dim], value: Any, dtype: Any = None, **kw: Any
) -> Tensor:
    chosen = x.dtype if dtype is None else requested_dtype(dtype, torch.float32)
    return Tensor(tuple(size), chosen, ex.round_to(element(value, chosen.compute), chosen))


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
    at = ex.index_value(positions((length,))[0])
    if plain:
        at = ex.index_value(positions((length,))[0] * step + start)
        value = ex.cast(at, chosen)
    else:
        wide = DType.F64
        stepped = ex.apply("mul", ex.cast(at, wide), element(float(step), wide))
        value = ex.cast(ex.apply("add", stepped, element(float(start), wide)), chosen)
    return Tensor((length,), chosen, ex.round_to(value, chosen))


@lowers("aten.eye.m", "aten.eye.default")
def eye(builder: Builder, rows: Dim, cols: Any = None, dtype: Any = None, **kw: Any) -> Tensor:
    shape = (rows, rows if cols is None else cols)
    chosen = requested_dtype(dtype, torch.get_default_dtype())
    at = positions(shape)
    same = ex.apply("eq", ex.index_value(at[0]), ex.index_value(at[1]))
    return Tensor(shape, chosen, ex.cast(same, chosen))
