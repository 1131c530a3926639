"""The table of matmuls: which ATen ops multiply matrices, and which argument is what.

Graph passes look up FX targets here, later rooms the library call of a `Matmul` node. Nothing else
in Perfuse recognises a matmul by the name of an op or by counting its arguments. Scaled matmuls are
nodes too, but no graph pass pads, joins or batches them: `matmul_op` does not have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_OVERLOADS = ("default", "out")


@dataclass(frozen=True, slots=True)
class Operands(Generic[T]):
    """The operands of a matmul, in whatever form a room has them: bias + (a @ b) * scales."""

    a: T
    b: T
    bias: T | None = None
    scales: tuple[T, ...] = ()  # of a and of b, one number each, or one for each row and column


Arguments = tuple[tuple[int, Any], ...]  # by their positions


@dataclass(frozen=True, slots=True)
class MatmulOp:
    """A row of the table: an ATen op, and the positions of its operands."""

    name: str  # without the overload: aten.addmm
    a: int
    b: int
    bias: int | None = None
    rank: int = 2  # dimensions of the second operand
    scales: tuple[int, ...] = ()
    fast_sums: int | None = None  # whether partial sums may be kept in fewer bits

    def operands(self, args: Any) -> Operands[Any]:
        """The operands among the arguments of a call of the op; a bias may be left out."""
        has_bias = self.bias is not None and self.bias < len(args)
        scales = tuple(args[position] for position in self.scales)
        return Operands(args[self.a], args[self.b], args[self.bias] if has_bias else None, scales)

    def rest(self, args: Sequence[Any]) -> Arguments:
        """The arguments of a call that are not operands, with their positions."""
        own = (self.a, self.b, self.bias, *self.scales)
        return tuple((k, value) for k, value in enumerate(args) if k not in own)

    def arguments(self, operands: Operands[Any], rest: Arguments = ()) -> tuple[Any, ...]:
        """The arguments of a call of the op, in order."""
        placed: dict[int, Any] = {self.a: operands.a, self.b: operands.b, **dict(rest)}
        placed |= dict(zip(self.scales, operands.scales, strict=True))
        if self.bias is not None and (operands.bias is not None or not self.scales):
            assert operands.bias is not None, f"{self.name} has a bias"
            placed[self.bias] = operands.bias
        return tuple(placed.get(position) for position in range(max(placed) + 1))


MATMULS = (
    MatmulOp("aten.mm", 0, 1),
    MatmulOp("aten.addmm", 1, 2, bias=0),
    MatmulOp("aten.bmm", 0, 1, rank=3),
    MatmulOp("aten.baddbmm", 1, 2, bias=0, rank=3),
    MatmulOp("aten.addmv", 1, 2, bias=0, rank=1),
    MatmulOp("aten._int_mm", 0, 1),
    MatmulOp("perfuse.aligned_matmul", 0, 1),
)
# The scale of the result, the type of the result and the kind of sums are plain arguments.
SCALED_MATMULS = (MatmulOp("aten._scaled_mm", 0, 1, bias=4, scales=(2, 3), fast_sums=7),)
_BY_NAME = {f"{row.name}.{overload}": row for row in MATMULS for overload in _OVERLOADS}
_SCALED_BY_NAME = {f"{row.name}.default": row for row in SCALED_MATMULS}


@dataclass(frozen=True, slots=True)
class RivalCall:
    """A library call that competes with ATen's for float32 matrices on a CPU.

    It computes a @ b, or a @ b + bias, and returns new memory.
    """

    op: str
    arguments: Callable[[Operands[Any]], tuple[Any, ...]]  # of views, or of tensors to measure it
    is_available: Callable[[], bool] = lambda: True
    # Whether it has a kernel for a second operand of these sizes and strides.
    reads: Callable[[Sequence[int], Sequence[int]], bool] = lambda shape, strides: True
    # The call in its place, with the same arguments, where sizes change; empty: the same call.
    of_changing_sizes: str = ""


def _has_linear() -> bool:
    available = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a matrix is stored without gaps, by rows or by columns."""
    rows, columns = shape
    steps = tuple(1 if size == 1 else step for size, step in zip(shape, strides, strict=True))
    return steps in ((1 if rows == 1 else columns, 1), (1, 1 if columns == 1 else rows))


# oneDNN's takes the second operand transposed. With gaps between its rows or columns it computes
# element by element: 128x192x128 takes 60 ms instead of 0.05 on one core of Zen 5.
LINEAR, CHANGING_LINEAR = "mkldnn._linear_pointwise.default", "perfuse.changing_linear.default"
RIVALS: list[RivalCall] = [
    RivalCall(
        LINEAR,
        lambda x: (x.a, x.b.T, x.bias, "none", [], ""),
        _has_linear,
        _is_dense,
        CHANGING_LINEAR,
    ),
]


# Ops of our own for groups of rows, each with a matrix of its own, and for the gradients of these.
ATEN_GROUPED_MATMUL = "aten._grouped_mm.default"
GROUPED_MATMUL, GROUPED_OUTER = "perfuse.grouped_matmul.out", "perfuse.grouped_outer.out"


def rival_call(op: str) -> RivalCall | None:
    """The row of a call that competes with ATen's; None for ATen's own, and other ops."""
    return next((row for row in RIVALS if op in (row.op, row.of_changing_sizes)), None)


def call_arguments(op: str, operands: Operands[Any], rest: Arguments = ()) -> tuple[Any, ...]:
    """The arguments of a library call that computes a matmul."""
    rival, row = rival_call(op), matmul_call(op)
    if rival is not None:
        return rival.arguments(operands)
    assert row is not None, f"{op} is not in the table of matmuls"
    return row.arguments(operands, rest)


def matmul_op(target: Any) -> MatmulOp | None:
    """The row of an FX target, or of the name of an op; None if it is not a plain matmul."""
    return _BY_NAME.get(target if isinstance(target, str) else str(target))


def matmul_call(op: str) -> MatmulOp | None:
    """The row of a library call, scaled or not; None if it is not a matmul."""
    return _SCALED_BY_NAME.get(op) or _BY_NAME.get(op)
