"""Matmuls of groups of rows, each with a matrix of its own: the experts of a mixture, on a CPU.

Groups are consecutive rows; `offsets` has the end of each. What no group covers is zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def grouped_matmul(rows: Tensor, matrices: Tensor, offsets: Tensor, *, out: Tensor) -> Tensor:
    """The rows of each group times the matrix of the group."""
    groups = list(_groups(offsets))
    if not _is_covered(groups, rows.shape[0]):
        out.zero_()
    for number, start, end in groups:
        torch.mm(rows[start:end], matrices[number], out=out[start:end])
    return out


def grouped_outer(rows: Tensor, others: Tensor, offsets: Tensor, *, out: Tensor) -> Tensor:
    """The rows of each group, transposed, times those of the others: gradients of matrices."""
    groups = list(_groups(offsets))
    for number in {*range(out.shape[0])} - {number for number, _, _ in groups}:
        out[number].zero_()
    for number, start, end in groups:
        torch.mm(rows[start:end].t(), others[start:end], out=out[number])
    return out


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
