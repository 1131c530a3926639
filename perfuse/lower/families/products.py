"""Matrix products: library calls that write into memory we own, any strides accepted.

Small ones are loops on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.ir.program import Extern, View
from perfuse.lower.builder import Builder, unsqueeze_dims
from perfuse.lower.families.pointwise import add as add_tensors
from perfuse.lower.families.pointwise import multiply
from perfuse.lower.layout import dense_strides
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, as_view, cast_tensor, positions, reindex

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


# On a GPU, a product of at most so many multiplications is a loop of ours: a call of the library
# takes the host longer than the GPU, and ends a run of launches.
SMALL_PRODUCT = 1 << 15


def _is_small(builder: Builder, a: Tensor, b: Tensor) -> bool:
    count = ix.product((*a.shape, b.shape[1]))
    is_small = isinstance(count, int) and 0 < count <= SMALL_PRODUCT
    return is_small and builder.is_gpu and a.dtype.is_float


def _as_loop(builder: Builder, a: Tensor, b: Tensor) -> Tensor:
    """Sums of products, accumulated wide and rounded once, as the library does it."""
    (rows, inner), columns, wide = a.shape, b.shape[1], a.dtype.compute
    shape = (rows, columns, inner)
    left = builder.broadcast(unsqueeze_dims(a, [1]), shape)
    turned = reindex(b, (columns, inner), positions((columns, inner))[::-1])
    right = builder.broadcast(unsqueeze_dims(turned, [0]), shape)
    value = ex.apply("mul", ex.cast(left.value, wide), ex.cast(right.value, wide))
    return cast_tensor(builder.reduce("sum", Tensor(shape, wide, value), [2], wide), a.dtype)


@lowers("aten.mm.default")
def mm(builder: Builder, a: Tensor, b: Tensor) -> Tensor:
    if _is_small(builder, a, b):
        return _as_loop(builder, a, b)
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
    is_plain = beta == 1 and alpha == 1 and bias.ndim == 1
    if builder.feeds_calls and is_plain and not _is_small(builder, a, b):
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
