"""The table of matmuls: which ATen ops multiply matrices, and which argument is what.

Graph passes look up FX targets here, later rooms the library call of a `Matmul` node. Nothing else
in Perfuse recognises a matmul by the name of an op or by counting its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_OVERLOADS = ("default", "out")


@dataclass(frozen=True, slots=True)
class Operands(Generic[T]):
    """The operands of a matmul, in whatever form a room has them: bias + a @ b."""

    a: T
    b: T
    bias: T | None = None


@dataclass(frozen=True, slots=True)
class MatmulOp:
    """A row of the table: an ATen op, and the positions of its operands."""

    name: str  # without the overload: aten.addmm
    a: int
    b: int
    bias: int | None = None
    rank: int = 2  # dimensions of the second operand

    def operands(self, args: Any) -> Operands[Any]:
        """The operands among the arguments of a call of the op."""
        return Operands(args[self.a], args[self.b], None if self.bias is None else args[self.bias])

    def arguments(self, operands: Operands[T]) -> tuple[T, ...]:
        """The arguments of a call of the op, in order."""
        placed = {self.a: operands.a, self.b: operands.b}
        if self.bias is not None:
            assert operands.bias is not None, f"{self.name} has a bias"
            placed[self.bias] = operands.bias
        return tuple(placed[position] for position in sorted(placed))


MATMULS = (
    MatmulOp("aten.mm", 0, 1),
    MatmulOp("aten.addmm", 1, 2, bias=0),
    MatmulOp("aten.bmm", 0, 1, rank=3),
    MatmulOp("aten.baddbmm", 1, 2, bias=0, rank=3),
    MatmulOp("aten.addmv", 1, 2, bias=0, rank=1),
    MatmulOp("aten._int_mm", 0, 1),
    MatmulOp("perfuse.aligned_matmul", 0, 1),
)
_BY_NAME = {f"{row.name}.{overload}": row for row in MATMULS for overload in _OVERLOADS}


@dataclass(frozen=True, slots=True)
class RivalCall:
    """A library call that competes with ATen's for float32 matrices on a CPU.

    It computes a @ b, or a @ b + bias, and returns new memory.
    """

    op: str
    arguments: Callable[[Operands[Any]], tuple[Any, ...]]  # of views, or of tensors to measure it
    is_available: Callable[[], bool] = lambda: True


def _has_linear() -> bool:
    available = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")


# oneDNN's takes the second operand transposed.
LINEAR = "mkldnn._linear_pointwise.default"
RIVALS: list[RivalCall] = [
    RivalCall(LINEAR, lambda x: (x.a, x.b.T, x.bias, "none", [], ""), _has_linear),
]


def rival_call(op: str) -> RivalCall | None:
    """The row of a call that competes with ATen's; None for ATen's own, and other ops."""
    return next((row for row in RIVALS if row.op == op), None)


def call_arguments(op: str, operands: Operands[Any]) -> tuple[Any, ...]:
    """The arguments of a library call that computes a matmul."""
    rival, row = rival_call(op), matmul_op(op)
    if rival is not None:
        return rival.arguments(operands)
    assert row is not None, f"{op} is not in the table of matmuls"
    return row.arguments(operands)


def matmul_op(target: Any) -> MatmulOp | None:
    """The row of an FX target, or of the name of an op; None if it is not a matmul."""
    return _BY_NAME.get(target if isinstance(target, str) else str(target))
