"""Matmuls of a value that is computed in chunks of its rows: in order, and added in place."""

from __future__ import annotations

import torch

from perfuse.graph import chunk_ops
from perfuse.ir.matmul import Operands
from perfuse.ir.program import BufferKind, Extern
from perfuse.lower.builder import Builder
from perfuse.lower.families.matmul import multiply_into, operand_window
from perfuse.lower.registry import lowers
from perfuse.lower.tensor import Tensor, cast_tensor

assert chunk_ops  # importing it defines the custom ops that are lowered here

_CHUNK = "loss by chunks of logits"


def _names(builder: Builder, values: list[Tensor]) -> tuple[str, ...]:
    """The buffers of values that a call comes after."""
    return tuple(dict.fromkeys(builder.view_of(value).buffer for value in values))


@lowers("perfuse.copy_after.default")
def copy_after(builder: Builder, x: Tensor, after: list[Tensor]) -> Tensor:
    names = _names(builder, after)
    copied = builder.new_buffer(x.dtype, x.shape, kind=BufferKind.EXTERN)
    op, kwargs = "aten.clone.default", (("memory_format", torch.contiguous_format),)
    view = builder.view_of(x)
    builder.call(
        Extern(op, (copied.name,), (view,), kwargs, _CHUNK, after=names, origin=builder.origin)
    )
    return builder.tensor_of(copied)


@lowers("perfuse.matmul_after.default")
def matmul_after(
    builder: Builder, a: Tensor, b: Tensor, bias: Tensor | None, after: list[Tensor]
) -> Tensor:
    """A library call that also depends on the values that it comes after."""
    names = _names(builder, after)
    left, right = (
        operand_window(builder, x, t) for x, t in zip((a, b), builder.arguments[:2], strict=True)
    )
    added = None if bias is None else builder.view_of(bias)
    out = builder.new_buffer(a.dtype, (a.shape[0], b.shape[1]))
    op = "aten.mm.out" if added is None else "aten.addmm.out"
    multiply_into(builder, op, Operands(left, right, added), out, _CHUNK, after=names)
    return builder.tensor_of(out)


@lowers("perfuse.add_matmul.default")
def add_matmul(builder: Builder, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A library call that reads the total and writes over it."""
    traced = builder.arguments[1:]
    left, right = (
        operand_window(builder, cast_tensor(x, total.dtype), t)
        for x, t in zip((a, b), traced, strict=True)
    )
    window = builder.view_of(total)
    operands, out = Operands(left, right, window), builder.buffers[window.buffer]
    multiply_into(builder, "aten.addmm.out", operands, out, _CHUNK, window)
    return builder.tensor_of_view(window)
