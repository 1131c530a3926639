"""PyTorch's type promotion for elementwise ops, over our dtypes and Python scalars."""

from __future__ import annotations

import torch

from perfuse.ir.dtype import DType, from_torch, to_torch
from perfuse.ir.expr import Expr
from perfuse.ir.index import Index
from perfuse.lower.tensor import Tensor

Promotable = Tensor | bool | int | float | Index | Expr


def _category(dtype: DType) -> int:
    return 0 if dtype is DType.BOOL else 2 if dtype.is_float else 1


def _scalar_dtype(value: Promotable) -> DType:
    if isinstance(value, bool):
        return DType.BOOL
    if isinstance(value, int | Index):
        return DType.I64
    default = from_torch(torch.get_default_dtype())
    assert default is not None
    return default


def _join(a: DType | None, b: DType) -> DType:
    if a is None or a is b:
        return b
    joined = from_torch(torch.promote_types(to_torch(a), to_torch(b)))
    assert joined is not None
    return joined


def promote(*operands: Promotable, int_to_float: bool = False) -> DType:
    """The dtype of an elementwise result: tensors with dimensions outrank 0-d, then scalars."""
    ranks: list[DType | None] = [None, None, None]
    for operand in operands:
        if isinstance(operand, Tensor):
            rank = 0 if operand.ndim else 1
            ranks[rank] = _join(ranks[rank], operand.dtype)
        else:
            ranks[2] = _join(ranks[2], _scalar_dtype(operand))
    result: DType | None = None
    for dtype in ranks:
        if dtype is None:
            continue
        if result is None or _category(dtype) > _category(result):
            result = dtype
    assert result is not None
    if ranks[0] is None and ranks[1] is None:
        assert ranks[2] is not None
        result = ranks[2]
    if int_to_float and not result.is_float:
        default = from_torch(torch.get_default_dtype())
        assert default is not None
        return default
    return result
