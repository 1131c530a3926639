"""Which axis of a map the lanes run along, by an estimate of what a vector of each costs.

Along the last axis most accesses are contiguous. But where that axis is shorter than a vector, or
windows and padding make every lane compute its own mask and address, lanes along an outer axis do
better: each load is a gather with a fixed stride, and masks and addresses are the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis
from perfuse.schedule.plan import Kernel
from perfuse.schedule.split_axes import divisions
from perfuse.schedule.transposed import transposed_axis_of

# In units of one vector instruction, on a Zen 5 with g++ 12: an item (its place from its number), a
# vector of positions (64 bits a lane), a masked load, one of a transposed tile; a quotient of
# positions and lanes one by one (per lane): at a stride, gathered, gathered under a mask.
_ITEM, _POSITIONS, _MASKED, _TILED = 4.0, 2.0, 3.0, 3.0
_QUOTIENT, _STRIDED, _GATHERED, _GATHERED_MASKED = 4.0, 1.5, 2.0, 5.0
# An outer axis has to be this much better.
_MARGIN = 0.6
_TYPICAL_SIZE = 64
# Fewer items are not spread evenly over threads; with fewer elements one thread does it all.
_LEAST_ITEMS, _ONE_THREAD = 16, 1 << 15


def with_cheapest_last(axes: tuple[Axis, ...], kernel: Kernel, lanes: int) -> tuple[Axis, ...]:
    """The axes of a map in another order, where its stores are scattered along the last one."""
    last, stores = axes[-1].atom, [m for m in kernel.members if m.loop.out in kernel.stored]
    if last is None or all(ix.coefficient_of(m.loop.index, last) in (0, 1) for m in stores):
        return axes

    def cost(order: tuple[Axis, ...]) -> float:
        costs = LaneCosts(kernel, lanes, transposed_axis_of(order, kernel.members))
        return costs.per_element(order[-1], order[-1])

    orders = [(*(a for a in axes if a is not b), b) for b in axes if b.atom is not None]
    best = min(orders, key=cost)
    return best if cost(best) < _MARGIN * cost(axes) else axes


@dataclass(frozen=True, slots=True)
class LaneCosts:
    """Costs of a map's elements by the axis that its lanes run along."""

    kernel: Kernel
    lanes: int
    tile_axis: Axis | None  # loads along it are transposed where lanes run along the last axis

    def best(self, axes: Sequence[Axis]) -> Axis | None:
        """An axis other than the last one that is better by far."""
        *rest, last = axes
        can = [a for i, a in enumerate(rest) if a.atom is not None and self._has_items(axes, i)]
        if last.atom is None or not can:
            return None
        costs = {a: self.per_element(a, last) for a in can}
        best = min(costs, key=lambda a: costs[a])
        return best if costs[best] < _MARGIN * self.per_element(last, last) else None

    def _has_items(self, axes: Sequence[Axis], place: int) -> bool:
        """Whether lanes along this axis leave enough items for threads."""
        sizes = [a.size if isinstance(a.size, int) else _TYPICAL_SIZE for a in axes]
        num_items = math.prod(sizes[:place]) * -(-sizes[place] // self.lanes)
        return num_items >= _LEAST_ITEMS or math.prod(sizes) < _ONE_THREAD

    def per_element(self, axis: Axis, last: Axis) -> float:
        assert axis.atom is not None
        tile = self.tile_axis.atom if self.tile_axis is not None and axis is last else None
        size = axis.size if isinstance(axis.size, int) else _TYPICAL_SIZE
        num_vectors = -(-size // self.lanes)
        # An item is a row along the last axis, or all that is inside of a vector of an outer one.
        return (num_vectors * self._per_vector(axis.atom, tile) + _ITEM) / max(size, 1)

    def _per_vector(self, lane: Atom, tile: Atom | None) -> float:
        made = {m.loop.out for m in self.kernel.members}
        total, seen = 0.0, set[Expr]()
        for m in self.kernel.members:
            if m.loop.out in self.kernel.stored:
                total += self._access(m.loop.index, lane, is_masked=False)
            for e in ex.walk(m.loop.value, seen):
                if e.op == "load" and e.buffer not in made:
                    is_masked = bool(e.args) and lane in e.args[0].variables()
                    is_tiled = tile is not None and ix.coefficient_of(e.index, tile) == 1
                    is_tiled = is_tiled and not e.args
                    total += _TILED if is_tiled else self._access(e.index, lane, is_masked)
                elif lane in e.variables():
                    is_place = e.op == "index"
                    total += _POSITIONS + self._quotients(e.index, lane) if is_place else 1.0
        return total

    def _access(self, index: Dim, lane: Atom, is_masked: bool) -> float:
        stride = ix.coefficient_of(index, lane)
        if stride == 0:
            return _MASKED if is_masked else 0.0
        if stride == 1:
            return _MASKED if is_masked else 1.0
        if is_masked:
            return self.lanes * _GATHERED_MASKED + self._quotients(index, lane)
        if stride is not None:
            return self.lanes * _STRIDED
        return self.lanes * _GATHERED + self._quotients(index, lane)

    def _quotients(self, index: Dim, lane: Atom) -> float:
        found = {d for d in divisions([index]) if lane in ix.atoms_of(d.numerator)}
        return self.lanes * _QUOTIENT * len(found)
