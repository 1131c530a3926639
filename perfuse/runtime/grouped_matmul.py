"""Matmuls of groups of rows, each with a matrix of its own: the experts of a mixture, on a CPU.

Groups are consecutive rows; `offsets` has the end of each. What no group covers is zero. Each
function has a form that multiplies by oneDNN, whose call returns new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perfuse.ir.matmul import GROUPED_MATMUL, GROUPED_OUTER, LINEAR, Operands, call_arguments
from perfuse.ir.matmul import grouped_by_linear as by_linear

# A matmul of two matrices into the memory of a third.
Multiply = Callable[[Tensor, Tensor, Tensor], Any]


def _by_default(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)


def _by_linear(a: Tensor, b: Tensor, out: Tensor) -> None:
    made = torch.ops.mkldnn._linear_pointwise.default(*call_arguments(LINEAR, Operands(a, b)))
    out.copy_(made)


def _matmul(
    multiply: Multiply, rows: Tensor, matrices: Tensor, offsets: Tensor, *, out: Tensor
) -> Tensor:
    """The rows of each group times the matrix of the group."""
    groups = list(_groups(offsets))
    if not _is_covered(groups, rows.shape[0]):
        out.zero_()
    for number, start, end in groups:
        multiply(rows[start:end], matrices[number], out[start:end])
    return out


def _outer(
    multiply: Multiply, rows: Tensor, others: Tensor, offsets: Tensor, *, out: Tensor
) -> Tensor:
    """The rows of each group, transposed, times those of the others: gradients of matrices."""
    groups = list(_groups(offsets))
    for number in {*range(out.shape[0])} - {number for number, _, _ in groups}:
        out[number].zero_()
    for number, start, end in groups:
        multiply(rows[start:end].t(), others[start:end], out[number])
    return out


GROUPED: dict[str, Callable[..., Tensor]] = {
    GROUPED_MATMUL: partial(_matmul, _by_default),
    by_linear(GROUPED_MATMUL): partial(_matmul, _by_linear),
    GROUPED_OUTER: partial(_outer, _by_default),
    by_linear(GROUPED_OUTER): partial(_outer, _by_linear),
}


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """The number, first row and end of each group that is not empty."""
    start = 0
    for number, end in enumerate(offsets.tolist()):
        if end != start:
            yield number, start, end
            start = end


def _is_covered(groups: list[tuple[int, int, int]], num_rows: int) -> bool:
    """Whether every row is in a group: offsets that fall leave rows out."""
    is_rising = all(start < end for _, start, end in groups)
    return is_rising and (groups[-1][2] if groups else 0) >= num_rows
