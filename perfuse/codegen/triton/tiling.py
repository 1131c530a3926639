"""How a kernel is cut into blocks, decided before anything is written.

flat      nothing is reduced, or all of it: blocks of a flat index
turned    a loop that reads against the grain: tiles of two axes
rows      blocks of whole rows; a row is held in registers, or swept in steps when it is long
columns   sums over rows: blocks of columns, each running down its share of the rows
split     few, long rows: several blocks share a row, and a launch a stage joins what they found
scan      values carried along a row
scatter   stores where data says: blocks of a flat index
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perfuse.gpu import BLOCK_THREADS
from perfuse.ir import index as ix
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis, Buffer
from perfuse.schedule.plan import Kernel, static_product
from perfuse.schedule.shape import turned_axis

FLAT_BLOCK = 1024
MOST_HELD = 32768  # columns of a row that registers of one block hold
MOST_SCANNED = 8192
LONG_ROW = 32768
ELEMENTS_A_THREAD = 16
WARP = 32


@dataclass(frozen=True, slots=True)
class Machine:
    """What tiling asks of a GPU."""

    num_processors: int = 132
    warp_size: int = 32
    shared_bytes: int = 227 << 10  # the most a block may use

    @property
    def most_warps(self) -> int:
        return BLOCK_THREADS // self.warp_size


@dataclass(frozen=True, slots=True)
class Tile:
    """One way to cut a kernel: a point of the space that tuning searches."""

    kind: str
    rows: int  # rows of a block
    columns: int  # columns of a block; elements of a flat one
    num_warps: int
    num_stages: int = 1
    is_swept: bool = False  # rows are longer than a block
    programs: int | None = None  # blocks go round until the work is done; None: a block each
    splits: int = 1  # blocks that share one row, or one column

    def __str__(self) -> str:
        swept = " swept" if self.is_swept else ""
        shared = f" / {self.splits}" if self.splits > 1 else ""
        rounds = f", {self.programs} programs" if self.programs else ""
        return (
            f"{self.kind}{swept} {self.rows}x{self.columns}{shared}, {self.num_warps} warps{rounds}"
        )


def power_of_two(size: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(size - 1, 0).bit_length()


def _below(size: int) -> int:
    return 1 << max(size, 1).bit_length() - 1


def rows_of(kernel: Kernel) -> tuple[Axis, ...]:
    return tuple(a for a in kernel.axes if not a.reduced)


def columns_of(kernel: Kernel) -> tuple[Axis, ...]:
    return tuple(a for a in kernel.axes if a.reduced)


def _warps(elements: int, a_thread: int = ELEMENTS_A_THREAD, most: int = 16) -> int:
    return max(1, min(most, _below(elements // (WARP * a_thread))))


def choose_tile(kernel: Kernel, machine: Machine, widest: int = 4) -> Tile:
    """The tile that the sizes suggest; `widest` is the bytes of the kernel's widest elements."""
    return fitted(_suggested(kernel, machine, widest), kernel, machine, widest)


def fitted(tile: Tile, kernel: Kernel, machine: Machine, widest: int) -> Tile:
    """The tile with no more threads than a block has, nor more on its way than memory holds.

    Each stage but one keeps a block of everything that is read: two of a row of 32,768 floats are
    more than any GPU has.
    """
    block = max(1, widest * _elements_read(tile, kernel))
    stages = max(1, min(tile.num_stages, 1 + machine.shared_bytes // block))
    tile = replace(tile, num_warps=min(tile.num_warps, machine.most_warps))
    if stages < tile.num_stages and stages == 1 and not _carries(kernel):
        return replace(tile, num_stages=1, programs=None)  # going round was for the stages
    return replace(tile, num_stages=stages)


def _elements_read(tile: Tile, kernel: Kernel) -> int:
    """Elements that one block reads from memory."""
    made = {m.loop.out for m in kernel.members}
    reads = {r for m in kernel.members for r in m.loop.reads() if r.attr[0] not in made}
    rows, columns = ({a.atom for a in axes} for axes in (rows_of(kernel), columns_of(kernel)))
    total = 0
    for used in (read.variables() for read in reads):
        is_flat = tile.kind in ("flat", "turned", "scatter")
        height = tile.rows if is_flat or used & rows else 1
        total += height * (tile.columns if is_flat or used & columns else 1)
    return total


def _carries(kernel: Kernel) -> bool:
    """Something is reduced across rows, so blocks that go round keep it meanwhile."""
    return any(m.role in ("outer", "all") for m in kernel.members)


def smaller(tile: Tile) -> Tile | None:
    """A tile that takes less shared memory; None where there is none."""
    if tile.num_stages > 1:
        return replace(tile, num_stages=tile.num_stages - 1)
    if tile.kind == "turned" and tile.rows > 16:
        return replace(tile, rows=tile.rows // 2, columns=tile.columns // 2)
    if tile.kind in ("rows", "scan") and not tile.is_swept:
        return replace(tile, rows=1, columns=min(2048, tile.columns), num_warps=8, is_swept=True)
    if tile.columns > 64:
        return replace(tile, columns=tile.columns // 2)
    return None


def _suggested(kernel: Kernel, machine: Machine, widest: int) -> Tile:
    roles = {m.role for m in kernel.members}
    if "scan" in roles:
        return _scan_tile(kernel)
    if "scatter" in roles:
        return Tile("scatter", 1, 512, 4)
    rows, columns = rows_of(kernel), columns_of(kernel)
    if not columns:
        return _flat_tile(kernel, machine, roles, widest)
    if roles <= {"full", "outer", "all"}:
        return _columns_tile(rows, columns, machine)
    return _rows_tile(kernel, machine, roles)


def _flat_tile(kernel: Kernel, machine: Machine, roles: set[str], widest: int) -> Tile:
    if turned_axis(kernel) is not None and "all" not in roles:
        return Tile("turned", 64, 64, 8)
    total = static_product([a.size for a in kernel.axes])
    block = FLAT_BLOCK if widest > 2 else 2 * FLAT_BLOCK  # sixteen bytes a load either way
    if total is not None:
        while block > 128 and total < block * machine.num_processors:
            block //= 2
    if "all" in roles:
        block = max(block, 256)
        blocks = None if total is None else -(-total // block)
        most = machine.num_processors * 8
        return Tile(
            "flat", 1, block, _warps(block, 8, 8), num_stages=3,
            programs=max(1, min(most, blocks or most)),
        )  # fmt: skip
    return Tile("flat", 1, block, max(1, min(4, block // 128)))


def _scan_tile(kernel: Kernel) -> Tile:
    columns = columns_of(kernel)[-1].size
    if isinstance(columns, int) and columns <= MOST_SCANNED:
        block = power_of_two(columns)
        rows = max(1, min(16, 1024 // block))
        return Tile("scan", rows, block, _warps(rows * block, 8, 8))
    return Tile("scan", 1, 2048, 8, is_swept=True)


def _columns_tile(rows: tuple[Axis, ...], columns: tuple[Axis, ...], machine: Machine) -> Tile:
    width, height = _static(columns), _static(rows)
    block = min(128, power_of_two(width)) if width is not None else 64
    step = max(1, min(64, 4096 // block))
    if height is not None:
        step = min(step, power_of_two(height))
    across = -(-width // block) if width is not None else 32
    wanted = max(1, 4 * machine.num_processors // across)
    if height is not None:
        wanted = min(wanted, max(1, height // (4 * step)))
    splits = _below(wanted) if wanted < 8 else wanted
    return Tile("columns", step, block, _warps(step * block), num_stages=2, splits=splits)


def _static(axes: tuple[Axis, ...]) -> int | None:
    return static_product([a.size for a in axes])


def is_vertical(kernel: Kernel) -> bool:
    """Rows lie innermost in memory: lanes should run along them."""
    return bool(kernel.axes) and not kernel.axes[-1].reduced and kernel.axes[-1].atom is not None


def _rows_tile(kernel: Kernel, machine: Machine, roles: set[str]) -> Tile:
    height, width = _static(rows_of(kernel)), _static(columns_of(kernel))
    carries = _carries(kernel)
    if width is not None and height is not None and not carries:
        if height * 2 <= machine.num_processors and width >= 8192:
            return _split_tile(kernel, height, width, machine)
    if is_vertical(kernel):
        tile = _vertical_tile(height, width)
    elif width is not None and power_of_two(width) <= _most_held(kernel):
        tile = _held_tile(height, power_of_two(width), machine)
    else:
        tile = Tile("rows", 1, 2048, 8, num_stages=3, is_swept=True)
    return _going_round(tile, height, machine, roles) if carries else tile


def _going_round(tile: Tile, height: int | None, machine: Machine, roles: set[str]) -> Tile:
    """Blocks that take one piece after another, with accumulators for what crosses rows.

    For columns every block leaves as many sums as a row is long: few blocks, of many rows.
    """
    has_columns = "outer" in roles
    rows = tile.rows
    if has_columns and not tile.is_swept:
        rows = max(rows, 4096 // tile.columns)
        if height is not None:
            rows = max(1, min(rows, _below(height // machine.num_processors)))
    elements = rows * tile.columns
    warps = tile.num_warps if tile.is_swept else _warps(elements, 16 if has_columns else 32)
    blocks = None if height is None else -(-height // rows)
    most = machine.num_processors * (2 if has_columns else max(1, 16 // warps))
    programs = max(1, min(most, blocks or most))
    return replace(tile, rows=rows, num_warps=warps, num_stages=3, programs=programs)


def _most_held(kernel: Kernel) -> int:
    """Fewer columns are held at once where each drags more values along."""
    reads = {r.attr[0] for m in kernel.members for r in m.loop.reads()}
    return MOST_HELD if len(reads) <= 4 else MOST_HELD // 2


def _held_tile(height: int | None, width: int, machine: Machine) -> Tile:
    rows = max(1, 1024 // width)
    if height is not None:
        rows = min(rows, power_of_two(height))
        while rows > 1 and height < rows * machine.num_processors:
            rows //= 2
    elements = rows * width
    warps = _warps(elements, 16 if elements <= 8192 else 32, 32)
    if width >= LONG_ROW and height is not None and height > machine.num_processors:
        # One block fills a processor: the next row has to be on its way while this one is summed.
        return Tile("rows", 1, width, warps, num_stages=3, programs=machine.num_processors)
    return Tile("rows", rows, width, warps)


def _vertical_tile(height: int | None, width: int | None) -> Tile:
    rows = 64 if height is None else min(64, power_of_two(height))
    columns = 16 if width is None else min(max(1, 1024 // rows), power_of_two(width))
    is_swept = width is None or width > columns
    return Tile("rows", rows, columns, 4, num_stages=2, is_swept=is_swept)


def _split_tile(kernel: Kernel, height: int, width: int, machine: Machine) -> Tile:
    rows = min(16, power_of_two(height)) if is_vertical(kernel) else 1
    block = max(64, 2048 // rows)
    blocks = -(-height // rows)
    splits = max(1, min(2 * machine.num_processors // blocks, -(-width // (2 * block)), 512))
    return Tile("split", rows, block, 8 if rows * block >= 2048 else 4, 2, True, None, splits)


def num_blocks(size: Dim, block: int) -> Dim:
    """How many blocks cover a size."""
    if isinstance(size, int):
        return -(-size // block)
    return ix.floordiv(ix.add(size, block - 1), block)


def candidates(kernel: Kernel, machine: Machine, widest: int = 4) -> list[Tile]:
    """The model's choice first, then others worth measuring."""
    best = choose_tile(kernel, machine, widest)
    others = {
        "flat": _other_flat,
        "turned": _other_turned,
        "rows": _other_rows,
        "columns": _other_columns,
    }.get(best.kind)
    found = [best] if others is None else [best, *others(kernel, best, machine)]
    found = [fitted(t, kernel, machine, widest) for t in found if t.num_warps >= 1]
    return list(dict.fromkeys(found))


def widest_of(kernel: Kernel, buffers: dict[str, Buffer]) -> int:
    """Bytes of the widest element that the kernel moves for every position."""
    names = {*kernel.reads(), *kernel.stored}
    sizes = [buffers[n].dtype.num_bytes for n in names if buffers[n].num_elements != 1]
    return max(sizes, default=4)


def _other_flat(kernel: Kernel, best: Tile, machine: Machine) -> list[Tile]:
    if best.programs is not None:
        wide = [replace(best, columns=c, num_warps=w) for c, w in ((2048, 8), (4096, 8), (2048, 4))]
        return [replace(t, programs=machine.num_processors * k) for t in wide for k in (4, 8)]
    sizes = ((512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8))
    return [replace(best, columns=c, num_warps=w) for c, w in sizes]


def _other_turned(kernel: Kernel, best: Tile, machine: Machine) -> list[Tile]:
    sizes = ((32, 32, 4), (64, 64, 4), (64, 64, 8), (32, 128, 8))
    return [replace(best, rows=r, columns=c, num_warps=w) for r, c, w in sizes]


def _other_rows(kernel: Kernel, best: Tile, machine: Machine) -> list[Tile]:
    height, width = _static(rows_of(kernel)), _static(columns_of(kernel))
    carries = _carries(kernel)
    found = []
    if best.is_swept:
        sizes = ((1024, 4), (2048, 4), (4096, 8), (4096, 16))
        found += [
            replace(best, columns=c, num_warps=w) for c, w in sizes if not is_vertical(kernel)
        ]
    else:
        found += [replace(best, num_warps=w) for w in (best.num_warps * 2, best.num_warps // 2)]
        found += [replace(best, rows=r) for r in (best.rows * 2, best.rows // 2) if r >= 1]
    if height is None or width is None or is_vertical(kernel):
        return found
    if not carries and not best.is_swept:
        rounds = [replace(best, num_stages=s, programs=machine.num_processors * k)
                  for s in (2, 3) for k in (1, 2, 4, 8) if k * best.num_warps <= 64]  # fmt: skip
        found += [t for t in rounds if (t.programs or 0) <= height]
        if best.columns >= 8192:
            found.append(Tile("rows", 1, 2048, 8, num_stages=3, is_swept=True))
            found.append(Tile("rows", 1, 1024, 4, num_stages=4, is_swept=True))
    if carries and best.programs is not None:
        found += [replace(best, programs=machine.num_processors * k) for k in (1, 2, 4, 8)]
    return found


def _other_columns(kernel: Kernel, best: Tile, machine: Machine) -> list[Tile]:
    found = [replace(best, splits=s) for s in (best.splits * 2, max(1, best.splits // 2))]
    for rows, columns, warps in ((16, 256, 8), (64, 64, 8), (8, 512, 8), (16, 128, 4)):
        found.append(replace(best, rows=rows, columns=columns, num_warps=warps))
    return found
