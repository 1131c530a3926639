"""Matmuls of groups of rows with a matrix for each group: the experts of a mixture.

transformers has an op of its own for them, which it uses wherever it is compiled in float32. As a
call it would allocate and clear its results each time, gradients of all experts' weights among
them: page faults, and passes over memory that the matmuls overwrite.
"""

from __future__ import annotations

from perfuse.ir.dtype import DType
from perfuse.ir.matmul import GROUPED_MATMUL, GROUPED_OUTER
from perfuse.ir.program import Buffer, Extern, View
from perfuse.lower.builder import Builder
from perfuse.lower.families.matmul import operand_window
from perfuse.lower.layout import dense_strides
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, permuted

_REASON = "matmuls of groups of rows use the library"


def _call(builder: Builder, op: str, args: tuple[View, ...], out: Buffer) -> Tensor:
    call = Extern(op, (out.name,), args, (), _REASON, takes_out=True, origin=builder.origin)
    builder.call(call)
    return builder.tensor_of(out)


def _check(builder: Builder, rows: Tensor) -> None:
    if builder.is_gpu:
        raise CannotLower("its groups are known on the GPU alone")
    if not rows.dtype.is_float:
        raise CannotLower("matmuls of groups are for floats")


@lowers("transformers.grouped_mm_fallback.default")
def grouped_matmul(builder: Builder, rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    _check(builder, rows)
    args = _windows(builder, (rows, matrices, offsets))
    out = builder.new_buffer(rows.dtype, (rows.shape[0], matrices.shape[2]))
    return _call(builder, GROUPED_MATMUL, args, out)


@lowers("transformers.grouped_mm_fallback_backward.default")
def grouped_matmul_backward(
    builder: Builder, rows: Tensor, matrices: Tensor, offsets: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of rows and of matrices, these with the strides of the matrices."""
    _check(builder, rows)
    left, right, at, given = _windows(builder, (rows, matrices, offsets, gradient))
    flipped = View(
        right.buffer,
        (right.shape[0], right.shape[2], right.shape[1]),
        (right.strides[0], right.strides[2], right.strides[1]),
        right.offset,
    )
    of_rows = builder.new_buffer(rows.dtype, rows.shape)
    return (
        _call(builder, GROUPED_MATMUL, (given, flipped, at), of_rows),
        _outer(builder, left, given, at, rows.dtype),
    )


def _outer(builder: Builder, left: View, right: View, offsets: View, dtype: DType) -> Tensor:
    """The gradients of matrices, by rows where that is how they are stored, else transposed."""
    matrices = builder.arguments[1]
    groups, inner, outer = builder.symbols.dims(matrices.shape)
    steps = dense_strides(matrices, builder.symbols)
    if steps is not None and steps[1] == 1 and steps[2] != 1:
        made = builder.new_buffer(dtype, (groups, outer, inner))
        return permuted(_call(builder, GROUPED_OUTER, (right, left, offsets), made), [0, 2, 1])
    made = builder.new_buffer(dtype, (groups, inner, outer), steps)
    return _call(builder, GROUPED_OUTER, (left, right, offsets), made)


def _windows(builder: Builder, given: tuple[Tensor, ...]) -> tuple[View, ...]:
    if len(builder.arguments) != len(given):
        raise CannotLower("arguments by name")
    pairs = zip(given, builder.arguments, strict=True)
    return tuple(operand_window(builder, x, traced) for x, traced in pairs)
