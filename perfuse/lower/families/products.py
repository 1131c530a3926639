"""Matrix products: library calls that write into memory we own, any strides accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.ir.program import Extern, View
from perfuse.lower.builder import Builder
from perfuse.lower.families.pointwise import add as add_tensors
from perfuse.lower.families.pointwise import multiply
from perfuse.lower.layout import dense_strides
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, as_view

_LIBRARY = "matrix products go to the library"


def _call(
    builder: Builder, op: str, args: Sequence[Tensor], shape: Sequence[Dim], dtype: DType, **kw: Any
) -> Tensor:
    # Only what comes last was traced as an argument: a product with a bias is called for its parts.
    traced = builder.arguments[-len(args) :]
    windows = tuple(_window(builder, a, t) for a, t in zip(args, traced, strict=True))
    out = builder.new_buffer(dtype, shape)
    builder.extern(
        Extern(op, (out.name,), windows, tuple(kw.items()), _LIBRARY, into_out=True,
               origin=builder.origin)
    )  # fmt: skip
    return builder.tensor_of(out)


def _window(builder: Builder, tensor: Tensor, traced: Any) -> View:
    """An operand in memory: as it lies if it does, else as the graph lays it."""
    view = as_view(tensor)
    if view is None or builder.buffers[view.buffer].dtype is not tensor.dtype:
        view = builder.view_of(tensor, dense_strides(traced, builder.symbols))
    if any(
        stride == 0 and size != 1 for stride, size in zip(view.strides, view.shape, strict=True)
    ):
        view = builder.view_of(builder.realize_copy(tensor))
    return view


@lowers("aten.mm.default")
def mm(builder: Builder, a: Tensor, b: Tensor) -> Tensor:
    return _call(builder, "aten.mm.out", [a, b], (a.shape[0], b.shape[1]), a.dtype)


@lowers("aten.bmm.default")
def bmm(builder: Builder, a: Tensor, b: Tensor) -> Tensor:
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return _call(builder, "aten.bmm.out", [a, b], shape, a.dtype)


@lowers("aten.addmm.default")
def addmm(
    builder: Builder, bias: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1
) -> Any:
    if not a.dtype.is_float or a.dtype.is_narrow_float:
        raise CannotLower("addmm of small floats rounds once, in the library")
    if builder.feeds_calls and beta == 1 and alpha == 1 and bias.ndim == 1:
        # Nobody could add the bias on the way: the library does it while it multiplies.
        shape = (a.shape[0], b.shape[1])
        return _call(builder, "aten.addmm.out", [bias, a, b], shape, a.dtype)
    return _with_bias(builder, mm(builder, a, b), bias, beta, alpha)


def _with_bias(builder: Builder, product: Tensor, bias: Tensor, beta: Any, alpha: Any) -> Tensor:
    """alpha*product + beta*bias; as in eager, a beta of 0 keeps NaN in the bias out."""
    if alpha != 1:
        product = multiply(builder, product, alpha)
    if beta == 0:
        return product
    return add_tensors(builder, product, bias, beta)


@lowers("aten.baddbmm.default")
def baddbmm(
    builder: Builder, bias: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1
) -> Any:
    if not a.dtype.is_float or a.dtype.is_narrow_float:
        raise CannotLower("baddbmm of small floats rounds once, in the library")
    return _with_bias(builder, bmm(builder, a, b), bias, beta, alpha)
