"""Layouts: which strides a result may have, and which views stay inside their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfuse.ir import index as ix
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer, View
from perfuse.lower.symbols import Symbols
from perfuse.torch_compat.tensors import overlaps


def reaches_outside(window: View, buffer: Buffer) -> bool:
    """Whether a view of known size extends beyond the memory of its buffer."""
    ends = [
        sum(st * (sz - 1) for sz, st in zip(part.shape, part.strides, strict=True))
        for part in (window, buffer)
    ]
    if not all(isinstance(n, int) for n in (window.offset, *ends)) or 0 in window.shape:
        return False
    return window.offset < 0 or window.offset + ends[0] > ends[1]  # type: ignore[operator]


def dense_strides(expected: Any, symbols: Symbols) -> tuple[Dim, ...] | None:
    """Eager's strides for a result, when they cover memory without gaps or overlap."""
    return dense(symbols.dims(expected.shape), symbols.strides(expected.stride()))


def dense(shape: Sequence[Dim], strides: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """The strides, when they cover memory without gaps or overlap."""
    return strides if dense_order(shape, strides) is not None else None


def dense_order(shape: Sequence[Dim], strides: Sequence[Dim]) -> list[int] | None:
    """Dimensions from the outermost in memory inwards, when memory is covered without gaps.

    The axes are taken from the innermost outwards, each where the ones before it end: symbols have
    no order, but they can be equal.
    """
    left = [d for d, size in enumerate(shape) if size != 1]
    order = [d for d, size in enumerate(shape) if size == 1]
    step: Dim = 1
    while left:
        found = next((d for d in left if strides[d] == step), None)
        if found is None:
            return None
        left.remove(found)
        order.append(found)
        step = ix.mul(step, shape[found])
    return order[::-1]


def memory_order(shape: Sequence[Dim], strides: Sequence[Dim]) -> list[int] | None:
    """Dimensions from the outermost in memory inwards; None where memory is not covered once."""
    order = dense_order(shape, strides)
    if order is None or not all(isinstance(n, int) for n in (*shape, *strides)):
        return order
    return sorted(range(len(shape)), key=lambda d: (shape[d] == 1, -int(strides[d])))  # type: ignore[arg-type]


def own_strides(shape: Sequence[Dim], strides: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """The strides a result must have: those of eager, gaps included, unless they overlap.

    A backward graph is compiled for the strides that were traced, so a saved slice keeps its gaps.
    """
    pairs = [(st, sz) for st, sz in zip(strides, shape, strict=True) if sz != 1]
    fixed = [(st, sz) for st, sz in pairs if isinstance(st, int) and isinstance(sz, int)]
    if len(fixed) < len(pairs):
        # Symbols have no order. Two elements in one place would be equal, so that a window that may
        # overlap does no harm; one that certainly does is not worth its memory.
        return None if len({st for st, _ in pairs}) < len(pairs) else strides
    return None if overlaps([sz for _, sz in fixed], [st for st, _ in fixed]) else strides
