"""Iteration domains: bringing loops over different but equal-sized axes to common ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis, Loop


def refine(
    first: Sequence[Dim], second: Sequence[Dim]
) -> tuple[list[Dim], list[list[int]], list[list[int]]] | None:
    """The coarsest axes that both lists of sizes are products of, and which make up each size.

    (4096, 1024) and (8, 512, 1024) give (8, 512, 1024), [[0, 1], [2]] and [[0], [1], [2]].
    """
    common: list[Dim] = []
    parts_a: list[list[int]] = [[] for _ in first]
    parts_b: list[list[int]] = [[] for _ in second]
    i, j = len(first) - 1, len(second) - 1
    a: Dim = first[i] if first else 1
    b: Dim = second[j] if second else 1
    while i >= 0 and j >= 0:
        size = _common_factor(a, b)
        if size is None:
            return None
        parts_a[i].append(len(common))
        parts_b[j].append(len(common))
        common.append(size)
        rest_a = 1 if a == size else ix.exact_div(a, size)
        rest_b = 1 if b == size else ix.exact_div(b, size)
        assert rest_a is not None and rest_b is not None
        a, b = rest_a, rest_b
        if a == 1:
            i -= 1
            a = first[i] if i >= 0 else 1
        if b == 1:
            j -= 1
            b = second[j] if j >= 0 else 1
    if i >= 0 or j >= 0:
        return None
    last = len(common) - 1
    common.reverse()
    for parts in (*parts_a, *parts_b):
        parts[:] = sorted(last - p for p in parts)
    return common, parts_a, parts_b


def _common_factor(a: Dim, b: Dim) -> Dim | None:
    if a == b:
        return a
    if isinstance(a, int) and isinstance(b, int):
        if a == 0 or b == 0:
            return None
        return b if a % b == 0 else a if b % a == 0 else None
    if ix.exact_div(a, b) is not None:
        return b
    return a if ix.exact_div(b, a) is not None else None


def axis_names(sizes: Sequence[Dim]) -> list[Dim]:
    """The variables of a kernel's axes: x0, x1, ..."""
    return [ix.var(f"x{i}", size) for i, size in enumerate(sizes)]


def joined(sizes: Sequence[Dim], variables: Sequence[Dim], parts: Sequence[int]) -> Dim:
    """One position made of several axes, outermost first."""
    return ix.flat([sizes[p] for p in parts], [variables[p] for p in parts])


def rewrite(loop: Loop, mapping: dict[Atom, Dim], axes: tuple[Axis, ...]) -> Loop:
    """A loop over other axes, its variables replaced everywhere."""
    if not mapping:
        return replace(loop, axes=axes)
    change = ex.Substitution(mapping)
    return replace(loop, axes=axes, value=change(loop.value), index=change.index(loop.index))


def natural_order(loop: Loop) -> tuple[Axis, ...]:
    """A loop's axes, slowest in memory first, judged by what it writes (or reads, to reduce)."""
    if loop.kind.is_scan:
        return loop.axes
    guide = loop.index
    if loop.is_reduction:
        reads = [r for r in loop.reads() if not r.args]
        if not reads:
            return loop.axes
        guide = max(reads, key=lambda r: _num_axes(loop, r.index)).index
    return order_by(loop.axes, guide)


def _num_axes(loop: Loop, index: Dim) -> int:
    used = ex.index_variables(index)
    return sum(a.atom in used for a in loop.axes)


def order_by(axes: tuple[Axis, ...], guide: Dim) -> tuple[Axis, ...]:
    """Axes by falling stride in an index; those it does not see keep their places."""
    strides = []
    for axis in axes:
        stride = ix.coefficient_of(guide, axis.atom) if axis.atom else 0
        if not isinstance(stride, int):
            return axes
        strides.append(abs(stride))
    seen = [i for i, stride in enumerate(strides) if stride]
    order = sorted(seen, key=lambda i: (-strides[i], i))
    result = list(axes)
    for place, source in zip(seen, order, strict=True):
        result[place] = axes[source]
    return tuple(result)
