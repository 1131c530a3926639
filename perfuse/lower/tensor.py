"""`Tensor`: a tensor as the formula of its elements, not yet in memory.

The formula uses the loop variables d0, d1, ... of the tensor's own dimensions, so tensors of
one shape combine without renaming and a view is a substitution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Indirect, Variable
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import View, contiguous_strides


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape, logical dtype, and the value of one element in compute precision."""

    shape: tuple[Dim, ...]
    dtype: DType
    value: Expr

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> Dim:
        return ix.product(self.shape)


def positions(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """The loop variables of a shape: d0, d1, ...; the constant 0 for sizes of one."""
    return tuple(ix.var(f"d{i}", size) for i, size in enumerate(shape))


def reindex(tensor: Tensor, shape: Sequence[Dim], source: Sequence[Dim]) -> Tensor:
    """A view: element at d0.. of the new shape is the old one's element at `source`."""
    mapping = {}
    for old, new in zip(positions(tensor.shape), source, strict=True):
        atom = ix.as_atom(old)
        if atom is not None and old is not new:
            mapping[atom] = new
    return Tensor(tuple(shape), tensor.dtype, ex.substitute(tensor.value, mapping))


def permuted(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The dimensions in another order, named by their old numbers."""
    shape = [tensor.shape[d] for d in order]
    at = positions(shape)
    return reindex(tensor, shape, [at[order.index(d)] for d in range(tensor.ndim)])


def expand(tensor: Tensor, shape: Sequence[Dim]) -> Tensor:
    """Broadcast to a shape, by PyTorch's rules (missing dimensions in front)."""
    if tuple(shape) == tensor.shape:
        return tensor
    lead = len(shape) - tensor.ndim
    at = positions(shape)
    source = [0 if size == 1 else at[lead + i] for i, size in enumerate(tensor.shape)]
    return reindex(tensor, shape, source)


def broadcast_shapes(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    ndim = max((len(s) for s in shapes), default=0)
    result: list[Dim] = [1] * ndim
    for shape in shapes:
        for i, size in enumerate(shape):
            at = ndim - len(shape) + i
            if result[at] == 1:
                result[at] = size
    return tuple(result)


def as_view(tensor: Tensor, own_strides: Sequence[Dim] = ()) -> View | None:
    """The tensor as a strided window on a buffer, if its formula is just that.

    `own_strides`, those of the buffer, are positive even where arithmetic cannot prove it.
    """
    value = tensor.value
    if value.op != "load" or value.args:
        return None
    buffer, index = value.attr
    strides: list[Dim] = []
    offset = index
    default = contiguous_strides(tensor.shape)
    for i, position in enumerate(positions(tensor.shape)):
        atom = ix.as_atom(position)
        stride = default[i] if atom is None else ix.coefficient_of(index, atom)
        if stride is None:
            return None
        strides.append(stride)
        if atom is not None:
            if stride not in own_strides and _may_run_backwards(stride):
                return None
            offset = ix.add(offset, ix.mul(ix.mul(position, stride), -1))
    if any(isinstance(a, Variable | Indirect) for a in ix.atoms_of(offset)):
        return None
    # A load is inside of its buffer, so an offset that is only known at run time is not negative.
    if isinstance(offset, int) and offset < 0:
        return None
    return View(buffer, tensor.shape, tuple(strides), offset)


def _may_run_backwards(stride: Dim) -> bool:
    """A stride given at run time is valid; only index arithmetic can flip its sign."""
    if isinstance(stride, int):
        return stride < 0
    has_minus = stride.const < 0 or any(factor < 0 for _, factor in stride.terms)
    return has_minus and not ix.is_nonnegative(stride)


def cast_tensor(tensor: Tensor, dtype: DType) -> Tensor:
    """The tensor converted to another dtype, rounding where the new dtype is a small float."""
    if tensor.dtype is dtype:
        return tensor
    value = ex.cast(tensor.value, dtype)
    if dtype.is_narrow_float:
        value = ex.round_to(value, dtype)
    return Tensor(tensor.shape, dtype, value)
