"""The loop structure of a kernel, decided before anything is written.

Rows are distributed to threads as items; each item sweeps its columns. Lanes run along the last
column axis where the columns are innermost in memory, else along the last row axis ("vertical":
every lane is a row of its own). A loop over all axes with nothing reduced ("plain") takes its last
axis as columns and distributes blocks of them; one with transposed reads goes tile by tile.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfuse.codegen.cpp.lane_choice import LaneCosts, with_cheapest_last
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Indirect
from perfuse.ir.dtype import DType
from perfuse.ir.program import Axis
from perfuse.schedule.plan import Kernel, Member, Role
from perfuse.schedule.transposed import transposed_axis_of

# Columns of a plain loop in one item: enough to amortise it, few enough to distribute.
BLOCK = 4096
# A tile of a transposing loop: both sides use up the cache lines they touch.
TILE_ROWS, TILE_COLUMNS = 32, 64
# The number of such loads that is worth more than walking through memory in order: the weights of
# a depthwise convolution, not the statistics of a norm.
_REREAD = 8
# Columns of a scatter that one item takes through all its rows.
SCATTER_BLOCK = 64


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Which axes are items, which are swept, and which one the lanes run along."""

    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    lane_axis: Axis | None
    tile_axis: Axis | None = None
    block: int | None = None  # steps of the lane axis in one item, when it is distributed too
    is_vertical: bool = False
    is_scan: bool = False
    is_scatter: bool = False

    @property
    def lane(self) -> Atom | None:
        return self.lane_axis.atom if self.lane_axis is not None else None


def shape_of(kernel: Kernel, lanes: int) -> KernelShape:
    """The one decision on how a kernel loops."""
    roles = {m.role for m in kernel.members}
    rows = tuple(a for a in kernel.axes if not a.reduced)
    columns = tuple(a for a in kernel.axes if a.reduced)
    if Role.SCAN in roles:
        return _scan_shape(kernel, rows, columns, lanes)
    if Role.SCATTER in roles:
        return _scatter_shape(kernel)
    if not columns:
        return _plain_shape(kernel, rows, lanes)
    last = kernel.axes[-1]
    if not last.reduced and last.atom is not None:
        others = tuple(a for a in rows if a is not last)
        return KernelShape(others, columns, last, block=lanes, is_vertical=True)
    return KernelShape(rows, columns, _looping(columns[-1]))


def _looping(axis: Axis) -> Axis | None:
    return axis if axis.atom is not None else None


def _plain_shape(kernel: Kernel, rows: tuple[Axis, ...], lanes: int) -> KernelShape:
    if not rows:
        return KernelShape((), (), None)
    rows = with_cheapest_last(rows, kernel, lanes) if kernel.batch is None else rows
    *rest, column = rows
    lane = _looping(column)
    tile = transposed_axis_of(rows, kernel.members)
    costs = LaneCosts(kernel, lanes, tile)
    other = costs.best(rows) if kernel.batch is None and lane is not None else None
    if other is not None:
        at = rows.index(other)
        return KernelShape(rows[:at], rows[at + 1 :], other, block=lanes, is_vertical=True)
    if tile is not None:
        others = tuple(a for a in rest if a is not tile)
        return KernelShape(others, (tile, column), lane, tile_axis=tile, block=TILE_COLUMNS)
    if rest and lane is not None and _is_reread(kernel, rest[-1], lane):
        # One vector of lanes along an axis at a time: what all its steps read stays in registers.
        return KernelShape(tuple(rest[:-1]), (rest[-1],), lane, block=lanes, is_vertical=True)
    is_long = lane is not None and not (isinstance(lane.size, int) and lane.size <= BLOCK)
    return KernelShape(tuple(rest), (column,), lane, block=BLOCK if is_long else None)


def _is_reread(kernel: Kernel, outer: Axis, lane: Axis) -> bool:
    """Whether most of what a kernel reads for each lane is the same at every step of an axis."""
    loads = {read for m in kernel.members for read in m.loop.reads()}
    along = [r for r in loads if lane.atom in r.variables()]
    same = [r for r in along if outer.atom not in r.variables()]
    return outer.atom is not None and len(same) >= _REREAD and 3 * len(same) >= len(along)


def _scan_shape(
    kernel: Kernel, rows: tuple[Axis, ...], columns: tuple[Axis, ...], lanes: int
) -> KernelShape:
    """Lanes along rows that are next to each other in memory, else along the scan."""
    index = kernel.members[0].loop.index
    for axis in rows:
        if axis.atom is not None and ix.coefficient_of(index, axis.atom) == 1:
            others = tuple(a for a in rows if a is not axis)
            return KernelShape(others, columns, axis, None, lanes, is_vertical=True, is_scan=True)
    # One by one, integers are added in a cycle each, floats in several. In another order doubles
    # may overflow elsewhere: floats do not, since they accumulate in double.
    column, dtype = columns[-1], kernel.members[0].loop.value.dtype
    is_short = isinstance(column.size, int) and column.size < lanes
    is_quicker = dtype.is_float and dtype is not DType.F64 and not is_short
    lane = _looping(column) if is_quicker else None
    return KernelShape(rows, columns, lane, is_scan=True)


def _scatter_shape(kernel: Kernel) -> KernelShape:
    """Items along axes on which stores cannot collide; the others run one by one."""
    safe = safe_axes(kernel.members[0], kernel.axes)
    last = _looping(kernel.axes[-1]) if kernel.axes else None
    rows = tuple(a for a in safe if a is not last)
    columns = tuple(a for a in kernel.axes if a not in rows)
    block = SCATTER_BLOCK if last in safe else None
    return KernelShape(rows, columns, last, block=block, is_scatter=True)


def safe_axes(member: Member, axes: tuple[Axis, ...]) -> list[Axis]:
    """Axes whose steps always store to different places."""
    index = member.loop.index
    inside: set[Atom] = set()
    for atom in ix.atoms_of(index):
        if isinstance(atom, Indirect):
            inside |= atom.value.variables()
    safe = []
    for axis in axes:
        if axis.atom is None or axis.atom in inside:
            continue
        stride = ix.coefficient_of(index, axis.atom)
        if isinstance(stride, int) and stride:
            safe.append(axis)
    return safe
