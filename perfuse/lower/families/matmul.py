"""Matmuls: library calls that write into memory we own, any strides accepted.

Small ones are loops on a GPU.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from perfuse.decision import library
from perfuse.graph import aligned_matmul as aligned_op
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.matmul import Operands
from perfuse.ir.program import Buffer, LoopKind, Matmul, View
from perfuse.lower.builder import Builder, unsqueeze_dims
from perfuse.lower.families.pointwise import add as add_tensors
from perfuse.lower.families.pointwise import multiply
from perfuse.lower.layout import dense_strides
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, as_view, cast_tensor, permuted, positions, reindex
from perfuse.selection import is_library_allowed

assert aligned_op  # importing it defines the custom op that is lowered here

_LIBRARY = "matmuls use the library"


def _call(builder: Builder, op: str, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    given = [x for x in (bias, a, b) if x is not None]
    # Only the last ones were traced as arguments: a matmul with a bias calls this for its parts.
    traced = builder.arguments[-len(given) :]
    *added, left, right = (
        operand_window(builder, x, t) for x, t in zip(given, traced, strict=True)
    )
    own = added[0] if added else None
    out = builder.new_buffer(a.dtype, (*a.shape[:-1], b.shape[-1]))
    multiply_into(builder, op, Operands(left, right, own), out)
    return builder.tensor_of(out)


def operand_window(builder: Builder, tensor: Tensor, traced: Any) -> View:
    """An operand in memory: in its own layout if it has one, else in the graph's."""
    view = as_view(tensor)
    if view is None or builder.buffers[view.buffer].dtype is not tensor.dtype:
        view = builder.view_of(tensor, dense_strides(traced, builder.symbols))
    # On a CPU the library takes one matrix for a whole batch.
    first = 0 if builder.is_gpu else max(0, len(view.shape) - 2)
    steps = zip(view.strides[first:], view.shape[first:], strict=True)
    if any(stride == 0 and size != 1 for stride, size in steps):
        view = builder.view_of(builder.realize_copy(tensor))
    return view


def _is_small(builder: Builder, a: Tensor, b: Tensor) -> bool:
    """Whether a matmul on a GPU is a generated loop.

    A library call costs the host more time than the GPU, and ends a run of launches. So a loop
    stands in for the library's call: where that may not be chosen, the loop may not be either.
    """
    count, most = ix.product((*a.shape, b.shape[1])), builder.settings.thresholds
    is_small = isinstance(count, int) and 0 < count <= most.gpu_loop_matmul_work
    return is_small and builder.is_gpu and a.dtype.is_float and is_library_allowed(builder.settings)


def _as_loop(builder: Builder, a: Tensor, b: Tensor) -> Tensor:
    """Sums of products, accumulated wide and rounded once, as the library does it."""
    (rows, inner), columns, wide = a.shape, b.shape[1], a.dtype.compute
    shape = (rows, columns, inner)
    left = builder.broadcast(unsqueeze_dims(a, [1]), shape)
    transposed = reindex(b, (columns, inner), positions((columns, inner))[::-1])
    right = builder.broadcast(unsqueeze_dims(transposed, [0]), shape)
    value = ex.apply("mul", ex.cast(left.value, wide), ex.cast(right.value, wide))
    return cast_tensor(builder.reduce(LoopKind.SUM, Tensor(shape, wide, value), [2], wide), a.dtype)


@lowers("aten.mm.default")
def mm(builder: Builder, a: Tensor, b: Tensor) -> Tensor:
    if _is_small(builder, a, b):
        return _as_loop(builder, a, b)
    return _call(builder, "aten.mm.out", a, b)


@lowers("aten.bmm.default")
def bmm(builder: Builder, a: Tensor, b: Tensor) -> Tensor:
    if _reads_once(builder, a, b):
        return _batch_as_loop(builder, a, b)
    return _call(builder, "aten.bmm.out", a, b)


def _reads_once(builder: Builder, a: Tensor, b: Tensor) -> bool:
    """Whether a batch of matmuls on a CPU reads a formula once, and would store it for that.

    So is it with matrices looked up for each row: experts by the number that a token chose. A
    copy of them all takes longer than any matmul of them with one vector each.
    """
    if builder.is_gpu or not a.dtype.is_float or builder.is_exact:
        return False
    matrices = [x for x, others in ((a, b.shape[2]), (b, a.shape[1])) if others == 1]
    is_outer = a.shape[2] == 1
    return is_outer or any(not _is_stored(builder, x) for x in matrices)


def _is_stored(builder: Builder, tensor: Tensor) -> bool:
    view = builder.window_on(tensor)
    return view is not None and builder.buffers[view.buffer].dtype is tensor.dtype


def _batch_as_loop(builder: Builder, a: Tensor, b: Tensor) -> Tensor:
    """Sums of products for each matrix of a batch, accumulated wide and rounded once.

    The loop that is innermost in the matrices' memory is the last one, reduced or not.
    """
    (batch, rows, inner), columns, wide = a.shape, b.shape[2], a.dtype.compute
    last = 1 if _steps_by_one(a, 1) else 2 if _steps_by_one(b, 2) else 3
    order = [d for d in (0, 1, 2, 3) if d != last] + [last]
    shape = tuple((batch, rows, columns, inner)[d] for d in order)
    left = permuted(unsqueeze_dims(a, [2]), order)
    right = permuted(unsqueeze_dims(permuted(b, [0, 2, 1]), [1]), order)
    factors = (builder.broadcast(x, shape) for x in (left, right))
    value = ex.apply("mul", *(ex.cast(x.value, wide) for x in factors))
    products, depth = Tensor(shape, wide, value), order.index(3)
    result = (
        builder.reduce(LoopKind.SUM, products, [depth], wide)
        if inner != 1
        else _squeezed(products, depth)
    )
    kept = [d for d in order if d != 3]
    return cast_tensor(permuted(result, [kept.index(d) for d in range(3)]), a.dtype)


def _squeezed(tensor: Tensor, dim: int) -> Tensor:
    """Without a dimension of size one."""
    shape = [*tensor.shape[:dim], *tensor.shape[dim + 1 :]]
    at = positions(shape)
    return reindex(tensor, shape, [*at[:dim], 0, *at[dim:]])


def _steps_by_one(tensor: Tensor, dim: int) -> bool:
    """Whether all that a formula reads along a dimension is contiguous."""
    atom = ix.as_atom(positions(tensor.shape)[dim])
    if atom is None:
        return False
    steps = [ix.coefficient_of(read.index, atom) for read in ex.loads_of(tensor.value)]
    return any(step == 1 for step in steps) and all(step in (0, 1) for step in steps)


@lowers("aten.addmm.default")
def addmm(
    builder: Builder, bias: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1
) -> Any:
    if not a.dtype.is_float or a.dtype.is_narrow_float:
        raise CannotLower("addmm of small floats rounds once, in the library")
    is_plain = beta == 1 and alpha == 1 and bias.ndim == 1
    if builder.feeds_calls and is_plain and not _is_small(builder, a, b):
        # No loop reads the result, so the library adds the bias while it multiplies.
        return _call(builder, "aten.addmm.out", a, b, bias)
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


# The alignment of rows that the library's fast kernels need.
_ALIGNED_BYTES = 16


@lowers("perfuse.aligned_matmul.default")
def aligned_matmul(builder: Builder, a: Tensor, b: Tensor) -> Tensor:
    """Matmuls that fill a result whose rows are not aligned, grouped by equal alignment.

    With 50257 columns of two bytes, each row starts two bytes further from an aligned address than
    the one before, and every eighth the same: together, and from their first aligned column on,
    they are a matrix with aligned rows. The columns at the edges are separate matmuls.
    """
    left, right = (
        operand_window(builder, x, t) for x, t in zip((a, b), builder.arguments, strict=True)
    )
    rows, columns = left.shape[0], right.shape[1]
    assert isinstance(rows, int) and isinstance(columns, int), "asked for with known sizes alone"
    unit = _ALIGNED_BYTES // a.dtype.num_bytes
    apart = unit // gcd(columns, unit)
    out = builder.new_buffer(a.dtype, (rows, columns))
    for first in range(min(apart, rows)):
        start = -first * columns % unit
        width = (columns - start) // unit * unit
        some = _every(left, apart, first)
        strides = (apart * columns, 1)
        window = View(out.name, (some.shape[0], width), strides, first * columns + start)
        reason = f"{_LIBRARY}: rows {first}, {first + apart}, ... of {rows} have equal alignment"
        operands = Operands(some, _columns_of(right, start, width))
        multiply_into(builder, "aten.mm.out", operands, out, reason, window)
    for start in (0, columns - unit):
        edge = builder.new_buffer(a.dtype, (rows, unit))
        reason = f"{_LIBRARY}: the columns at an edge of unaligned rows"
        operands = Operands(left, _columns_of(right, start, unit))
        multiply_into(builder, "aten.mm.out", operands, edge, reason)
        row, column = positions(edge.shape)
        builder.store(builder.tensor_of(edge), out, out.index((row, ix.add(column, start))))
    return builder.tensor_of(out)


def multiply_into(
    builder: Builder, op: str, operands: Operands[View], out: Buffer, reason: str = _LIBRARY,
    window: View | None = None, after: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """A library call that fills a buffer, or a window of it, after others were filled."""
    builder.call(
        Matmul(operands, out.name, library(op), out.dtype.compute, reason, window=window,
               after=after, origin=builder.origin)
    )  # fmt: skip


def _every(view: View, apart: int, first: int) -> View:
    """Every `apart`-th row."""
    (rows, depth), (down, along) = view.shape, view.strides
    assert isinstance(rows, int)
    count = -(-(rows - first) // apart)
    start = ix.add(view.offset, ix.mul(down, first))
    return View(view.buffer, (count, depth), (ix.mul(down, apart), along), start)


def _columns_of(view: View, start: int, count: int) -> View:
    offset = ix.add(view.offset, ix.mul(view.strides[1], start))
    return View(view.buffer, (view.shape[0], count), view.strides, offset)
