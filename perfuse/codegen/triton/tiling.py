"""How a kernel is tiled, decided before any text is written.

flat      nothing is reduced, or all of it: blocks of a flat index
grouped   the same, in groups of neighbours that share what does not vary along the last axis
stacked   blocks of the inner axes for several steps of the first, where much is the same for each
transposed a loop with transposed reads: tiles of two axes
rows      blocks of whole rows; a row is held in registers, or swept in steps when it is long
columns   sums over rows: blocks of columns, each running down its share of the rows
split     few, long rows: several blocks share a row, and a launch per stage combines them
scan      values carried along a row
scatter   stores at data-dependent positions: blocks of a flat index
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from perfuse.codegen.triton.pairing import is_one_sweep
from perfuse.gpu import BLOCK_THREADS
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis, Buffer
from perfuse.schedule.plan import Kernel, Role, static_product
from perfuse.schedule.tile import Tile, TileKind
from perfuse.schedule.transposed import quantised_axes, transposed_axis

FLAT_BLOCK = 1024
MOST_HELD = 32768  # columns of a row that registers of one block hold
MOST_SCANNED = 8192
LONG_ROW = 32768
LARGE_BYTES = 32 << 20  # the part that is read of a tensor that no cache could hold anyway
ELEMENTS_A_THREAD = 16
READ_A_THREAD = 32  # bytes a thread has on their way where all it does is read
SEARCHED_A_THREAD = 128  # the same where it keeps places: fewer threads have to agree
WARP = 32
MANY_LOADS = 5
PLAIN_COST = 16  # in units of one add, for an element
# Kinds whose blocks vary along every axis.
_FLAT = (TileKind.FLAT, TileKind.GROUPED, TileKind.STACKED, TileKind.TRANSPOSED, TileKind.SCATTER)
GROUP = 8  # neighbours along the last axis: sixteen bytes of halves


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """The properties of a GPU that tiling depends on."""

    num_processors: int = 132
    warp_size: int = 32
    shared_bytes: int = 227 << 10  # the most a block may use

    @property
    def most_warps(self) -> int:
        return BLOCK_THREADS // self.warp_size


def power_of_two(size: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(size - 1, 0).bit_length()


def _below(size: int) -> int:
    return 1 << max(size, 1).bit_length() - 1


def rows_of(kernel: Kernel) -> tuple[Axis, ...]:
    return tuple(a for a in kernel.axes if not a.reduced)


def columns_of(kernel: Kernel) -> tuple[Axis, ...]:
    return tuple(a for a in kernel.axes if a.reduced)


def _warps(elements: int, a_thread: int = ELEMENTS_A_THREAD, most: int = 16) -> int:
    return max(1, min(most, _below(elements // (WARP * a_thread))))


def choose_tile(kernel: Kernel, limits: GpuLimits, widest: int = 4) -> Tile:
    """The tile that the sizes suggest; `widest` is the bytes of the kernel's widest elements."""
    return fitted(_suggested(kernel, limits, widest), kernel, limits, widest)


def fitted(tile: Tile, kernel: Kernel, limits: GpuLimits, widest: int) -> Tile:
    """The tile with no more threads than a block has, nor more on its way than memory holds.

    Each stage but one keeps a block of everything that is read: two of a row of 32,768 floats are
    more than any GPU has.
    """
    block = max(1, widest * _elements_read(tile, kernel))
    stages = max(1, min(tile.num_stages, 1 + limits.shared_bytes // block))
    tile = replace(tile, num_warps=min(tile.num_warps, limits.most_warps))
    if stages < tile.num_stages and stages == 1 and not _carries(kernel):
        return replace(tile, num_stages=1, programs=None)  # persistent blocks served the pipelining
    return replace(tile, num_stages=stages)


def _elements_read(tile: Tile, kernel: Kernel) -> int:
    """Elements that one block reads from memory."""
    made = {m.loop.out for m in kernel.members}
    reads = {r for m in kernel.members for r in m.loop.reads() if r.buffer not in made}
    rows, columns = ({a.atom for a in axes} for axes in (rows_of(kernel), columns_of(kernel)))
    total = 0
    for used in (read.variables() for read in reads):
        is_flat = tile.kind in _FLAT
        height = tile.rows if is_flat or used & rows else 1
        total += height * (tile.columns if is_flat or used & columns else 1)
    return total


def _carries(kernel: Kernel) -> bool:
    """Something is reduced across rows, so persistent blocks accumulate it."""
    return any(m.role in (Role.OUTER, Role.ALL) for m in kernel.members)


def smaller(tile: Tile) -> Tile | None:
    """A tile that uses less shared memory; None if there is none."""
    if tile.num_stages > 1:
        return replace(tile, num_stages=tile.num_stages - 1)
    if tile.kind is TileKind.TRANSPOSED and tile.rows > 16:
        return replace(tile, rows=tile.rows // 2, columns=tile.columns // 2)
    if tile.kind in (TileKind.ROWS, TileKind.SCAN) and not tile.is_swept:
        return replace(tile, rows=1, columns=min(2048, tile.columns), num_warps=8, is_swept=True)
    if tile.columns > 64:
        return replace(tile, columns=tile.columns // 2)
    return None


def _suggested(kernel: Kernel, limits: GpuLimits, widest: int) -> Tile:
    roles = {m.role for m in kernel.members}
    if Role.SCAN in roles:
        return _scan_tile(kernel)
    if Role.SCATTER in roles:
        return Tile(TileKind.SCATTER, 1, 512, 4)
    if not columns_of(kernel):
        return _flat_tile(kernel, limits, roles, widest)
    if roles <= {Role.FULL, Role.OUTER, Role.ALL}:
        return _columns_tile(kernel, limits, widest)
    return _rows_tile(kernel, limits, roles, widest)


def _flat_tile(kernel: Kernel, limits: GpuLimits, roles: set[Role], widest: int) -> Tile:
    if quantised_axes(kernel.axes, kernel.members):
        return _quantised_tile(kernel, limits, roles)
    if transposed_axis(kernel) is not None and Role.ALL not in roles:
        return Tile(TileKind.TRANSPOSED, 64, 64, 8)
    total = static_product([a.size for a in kernel.axes])
    # Sixteen bytes a load either way; where much is loaded, fewer at a time, and more blocks.
    is_wide = widest <= 2 and (Role.ALL in roles or _num_loads(kernel) < MANY_LOADS)
    block = 2 * FLAT_BLOCK if is_wide else FLAT_BLOCK
    if total is not None:
        while block > 128 and total < block * limits.num_processors:
            block //= 2
    if Role.ALL in roles:
        block = max(block, 256)
        blocks = None if total is None else -(-total // block)
        most = limits.num_processors * 8
        # What is written waits for what is read, so that is on its way ahead; registers alone do
        # where nothing is.
        stages = 3 if _stores_rows(kernel) else 1
        programs = max(1, min(most, blocks or most))
        warps = _warps(block, 8, 8)
        return Tile(TileKind.FLAT, 1, block, warps, num_stages=stages, programs=programs)
    tile = Tile(TileKind.FLAT, 1, block, max(1, min(4, block // 128)))
    is_grouped = block >= GROUP * WARP and _can_group(kernel) and _shares_rows(kernel)
    return _grouped(tile) if is_grouped else tile


def _quantised_tile(kernel: Kernel, limits: GpuLimits, roles: set[Role]) -> Tile:
    """Tiles of two axes; persistent blocks keep what is reduced on the way in registers."""
    tile = Tile(TileKind.TRANSPOSED, 64, 64, 8)
    if Role.ALL not in roles:
        return tile
    total, most = static_product([a.size for a in kernel.axes]), 4 * limits.num_processors
    programs = most if total is None else min(most, -(-total // (tile.rows * tile.columns)))
    return replace(tile, programs=max(1, programs))


def _num_loads(kernel: Kernel) -> int:
    made = {m.loop.out for m in kernel.members}
    reads = {r.attr for m in kernel.members for r in m.loop.reads()}
    return sum(name not in made for name, _ in reads)


def _grouped(tile: Tile) -> Tile:
    return replace(tile, kind=TileKind.GROUPED, rows=tile.columns // GROUP, columns=GROUP)


def _looping(kernel: Kernel) -> list[Axis]:
    return [a for a in kernel.axes if a.atom is not None]


def _stacked_tiles(kernel: Kernel) -> list[Tile]:
    """Tiles of several steps of the first axis, where something large is read again for each."""
    axes = _looping(kernel)
    first, size = axes[0] if axes else None, _static(tuple(axes[1:]))
    if first is None or not isinstance(first.size, int) or size is None or size % 1024:
        return []
    reads = [r.variables() for m in kernel.members for r in m.loop.reads()]
    if all(first.atom in found for found in reads if found):
        return []
    return [Tile(TileKind.STACKED, r, 1024, 4) for r in (2, 4) if first.size % r == 0]


def _can_group(kernel: Kernel) -> bool:
    axes = _looping(kernel)
    return len(axes) > 1 and isinstance(axes[-1].size, int) and axes[-1].size % GROUP == 0


def _shares_rows(kernel: Kernel) -> bool:
    """Whether neighbours along the last axis have more than shifts in common: divisions, loads."""
    last = _looping(kernel)[-1]
    reads = [r.variables() for m in kernel.members for r in m.loop.reads()]
    is_divided = isinstance(last.size, int) and last.size & (last.size - 1) != 0
    return is_divided or any(last.atom not in found for found in reads if found)


def _scan_tile(kernel: Kernel) -> Tile:
    columns = columns_of(kernel)[-1].size
    if isinstance(columns, int) and columns <= MOST_SCANNED:
        block = power_of_two(columns)
        rows = max(1, min(16, 1024 // block))
        return Tile(TileKind.SCAN, rows, block, _warps(rows * block, 8, 8))
    return Tile(TileKind.SCAN, 1, 2048, 8, is_swept=True)


# Columns of a block, elements a thread, warps, stages, blocks a processor: of what computes much,
# and of plain sums. Measured; of floats that compute much a thread has few, or its registers leave
# no room for a second block.
_HALVES_CUT = ((64, 32, 4, 4, 2), (64, 32, 8, 1, 4))
_FLOATS_CUT = ((128, 8, 8, 4, 2), (128, 32, 4, 4, 2))


def _columns_tile(kernel: Kernel, limits: GpuLimits, widest: int) -> Tile:
    height, width = _static(rows_of(kernel)), _static(columns_of(kernel))
    is_plain = _is_plain_sum(kernel)
    cut = _HALVES_CUT if widest <= 2 else _FLOATS_CUT
    most_columns, a_thread, warps, stages, per_processor = cut[is_plain]
    block = min(most_columns, power_of_two(width)) if width is not None else 64
    step = max(1, min(128, WARP * warps * a_thread // block))
    if height is not None:
        step = min(step, power_of_two(height))
    across = -(-width // block) if width is not None else 32
    wanted = max(1, per_processor * limits.num_processors // across)
    if height is not None:
        wanted = min(wanted, max(1, height // (stages * step)))
    splits = _below(wanted) if wanted < 8 else wanted
    warps = min(warps, _warps(step * block, a_thread))
    return Tile(TileKind.COLUMNS, step, block, warps, num_stages=stages, splits=splits)


def _is_plain_sum(kernel: Kernel) -> bool:
    """Nothing but reductions, of not much more than what is read."""
    costs = [m.loop.value.cost for m in kernel.members]
    return not _stores_rows(kernel) and sum(costs) <= PLAIN_COST


def _static(axes: tuple[Axis, ...]) -> int | None:
    return static_product([a.size for a in axes])


def is_vertical(kernel: Kernel) -> bool:
    """Rows are innermost in memory: lanes should run along them."""
    return bool(kernel.axes) and not kernel.axes[-1].reduced and kernel.axes[-1].atom is not None


def _rows_tile(kernel: Kernel, limits: GpuLimits, roles: set[Role], widest: int) -> Tile:
    height, width = _static(rows_of(kernel)), _static(columns_of(kernel))
    carries = _carries(kernel)
    if width is not None and height is not None and not carries:
        if height * 2 <= limits.num_processors and width >= 8192:
            return _split_tile(kernel, height, width, limits)
    if is_vertical(kernel):
        tile = _vertical_tile(height, width)
    elif width is not None and width >= LONG_ROW // 2 and not carries and is_one_sweep(kernel):
        is_few = height is not None and height < 8 * limits.num_processors
        block, warps, stages = (4096, 16, 3) if is_few else (2048, 4, 4)
        tile = Tile(TileKind.ROWS, 1, block, warps, num_stages=stages, is_swept=True)
    elif width is not None and power_of_two(width) <= _most_held(kernel):
        tile = _held_tile(height, power_of_two(width), limits)
        if not _stores_rows(kernel):
            a_thread = SEARCHED_A_THREAD if _keeps_places(kernel) else READ_A_THREAD
            warps = _warps(tile.rows * tile.columns, a_thread // widest)
            tile = replace(tile, num_warps=min(tile.num_warps, warps))
    else:
        tile = Tile(TileKind.ROWS, 1, 2048, 8, num_stages=3, is_swept=True)
    return _persistent(tile, height, limits, roles) if carries else tile


def _persistent(tile: Tile, height: int | None, limits: GpuLimits, roles: set[Role]) -> Tile:
    """Blocks that take one piece after another, with accumulators for what crosses rows.

    For columns every block writes a sum per column of a row, so there are few blocks; a thread
    has the same columns of every row, and what belongs to a column is read once.
    """
    has_columns = Role.OUTER in roles
    rows, warps = tile.rows, tile.num_warps
    if not tile.is_swept:
        if has_columns:
            warps = max(1, min(16, tile.columns // (WARP * GROUP)))
            rows = max(1, (4 if warps <= 4 else 2) * WARP * GROUP * warps // tile.columns)
        else:
            warps = _warps(rows * tile.columns, 32)
        if has_columns and height is not None and power_of_two(height) <= rows:
            rows = power_of_two(height)  # one block for all: nothing is left to be joined
        elif has_columns and height is not None:
            rows = max(1, min(rows, _below(height // limits.num_processors)))
    blocks = None if height is None else -(-height // rows)
    most = limits.num_processors * (max(2, 8 // warps) if has_columns else max(1, 16 // warps))
    programs = max(1, min(most, blocks or most))
    return replace(tile, rows=rows, num_warps=warps, num_stages=3, programs=programs)


def _stores_rows(kernel: Kernel) -> bool:
    """Whether anything as long as a row is written."""
    return any(m.role == Role.FULL and m.loop.out in kernel.stored for m in kernel.members)


def _keeps_places(kernel: Kernel) -> bool:
    return any(m.loop.kind.is_position for m in kernel.members)


def _most_held(kernel: Kernel) -> int:
    """Fewer columns are held at once where each needs more values."""
    reads = {r.buffer for m in kernel.members for r in m.loop.reads()}
    return MOST_HELD if len(reads) <= 4 else MOST_HELD // 2


def _held_tile(height: int | None, width: int, limits: GpuLimits) -> Tile:
    rows = max(1, 1024 // width)
    if height is not None:
        rows = min(rows, power_of_two(height))
        while rows > 1 and height < rows * limits.num_processors:
            rows //= 2
    elements = rows * width
    warps = _warps(elements, 16 if elements <= 8192 else 32, 32)
    if width >= LONG_ROW and height is not None and height > limits.num_processors:
        # One block fills a processor: the next row has to be on its way while this one is summed.
        return Tile(TileKind.ROWS, 1, width, warps, num_stages=3, programs=limits.num_processors)
    return Tile(TileKind.ROWS, rows, width, warps)


def _vertical_tile(height: int | None, width: int | None) -> Tile:
    rows = 64 if height is None else min(64, power_of_two(height))
    columns = 16 if width is None else min(max(1, 1024 // rows), power_of_two(width))
    is_swept = width is None or width > columns
    return Tile(TileKind.ROWS, rows, columns, 4, num_stages=2, is_swept=is_swept)


def _split_tile(kernel: Kernel, height: int, width: int, limits: GpuLimits) -> Tile:
    rows = min(16, power_of_two(height)) if is_vertical(kernel) else 1
    block = max(64, 2048 // rows)
    blocks = -(-height // rows)
    splits = max(1, min(2 * limits.num_processors // blocks, -(-width // (2 * block)), 512))
    warps = 8 if rows * block >= 2048 else 4
    return Tile(TileKind.SPLIT, rows, block, warps, num_stages=2, is_swept=True, splits=splits)


def num_blocks(size: Dim, block: int) -> Dim:
    """How many blocks cover a size."""
    if isinstance(size, int):
        return -(-size // block)
    return ix.floordiv(ix.add(size, block - 1), block)


def candidates(kernel: Kernel, limits: GpuLimits, widest: int = 4) -> list[Tile]:
    """The model's choice first, then others worth measuring."""
    best = choose_tile(kernel, limits, widest)
    others = {
        TileKind.FLAT: _other_flat,
        TileKind.GROUPED: _other_grouped,
        TileKind.TRANSPOSED: _other_transposed,
        TileKind.ROWS: _other_rows,
        TileKind.COLUMNS: _other_columns,
    }.get(best.kind)
    found = [best] if others is None else [best, *others(kernel, best, limits)]
    if may_stream(kernel, widest):
        found.append(replace(best, streams=False))
    found = [fitted(t, kernel, limits, widest) for t in found if t.num_warps >= 1]
    return list(dict.fromkeys(found))


def may_stream(kernel: Kernel, num_bytes: int) -> bool:
    """Whether a kernel reduces more elements of this size than a cache holds."""
    count = static_product([a.size for a in kernel.axes])
    reduces = any(m.role in (Role.INNER, Role.OUTER, Role.ALL) for m in kernel.members)
    return reduces and count is not None and count * num_bytes >= LARGE_BYTES


def widest_of(kernel: Kernel, buffers: Mapping[str, Buffer]) -> int:
    """Bytes of the widest element that the kernel moves for every position."""
    return max((kind.num_bytes for kind in _moved(kernel, buffers)), default=4)


def moves_float32(kernel: Kernel, buffers: Mapping[str, Buffer]) -> bool:
    """Whether floats of full width are moved for every position.

    What is computed of halves, or is rounded to halves, hides the error of an approximation. Where
    floats are moved nothing does, and as many bytes more leave time for more instructions.
    """
    return any(kind.is_float and kind.num_bytes >= 4 for kind in _moved(kernel, buffers))


def _moved(kernel: Kernel, buffers: Mapping[str, Buffer]) -> list[DType]:
    """The kinds of elements that are moved for (nearly) every position."""
    counts = {
        n: static_product((buffers[n].num_elements,)) for n in (*kernel.reads(), *kernel.stored)
    }
    most = max((count for count in counts.values() if count is not None), default=1)
    wide = [n for n, count in counts.items() if count is None or count > max(1, most // 8)]
    return [buffers[n].dtype for n in wide]


def _other_flat(kernel: Kernel, best: Tile, limits: GpuLimits) -> list[Tile]:
    if best.programs is not None:
        cuts = ((2048, 8, 3, 8), (2048, 4, 3, 8), (4096, 8, 3, 4), (4096, 8, 1, 4), (8192, 8, 1, 4))
        return [
            replace(best, columns=c, num_warps=w, num_stages=s, programs=limits.num_processors * k)
            for c, w, s, k in cuts
        ]
    sizes = ((1024, 4), (2048, 4), (2048, 8), (4096, 8))
    found = [replace(best, columns=c, num_warps=w) for c, w in sizes]
    if _can_group(kernel):
        found.append(_grouped(replace(best, columns=2048)))
    return [*found, *_stacked_tiles(kernel)]


def _other_grouped(kernel: Kernel, best: Tile, limits: GpuLimits) -> list[Tile]:
    sizes = ((64, 4), (128, 4), (128, 2), (256, 4), (256, 8))
    flat = replace(best, kind=TileKind.FLAT, rows=1, columns=best.rows * best.columns)
    return [flat, *(replace(best, rows=r, num_warps=w) for r, w in sizes)]


def _other_transposed(kernel: Kernel, best: Tile, limits: GpuLimits) -> list[Tile]:
    sizes = ((32, 32, 4), (64, 64, 4), (64, 64, 8), (32, 128, 8))
    return [replace(best, rows=r, columns=c, num_warps=w) for r, c, w in sizes]


def _other_rows(kernel: Kernel, best: Tile, limits: GpuLimits) -> list[Tile]:
    height, width = _static(rows_of(kernel)), _static(columns_of(kernel))
    if height is None or width is None or is_vertical(kernel):
        return []
    if best.is_swept:
        return _other_swept(best)
    if _carries(kernel):
        return _other_carrying(best, height, limits)
    changes = [*((1, w) for w in (0.5, 2.0, 4.0)), (2, 1.0), (2, 2.0), (0.5, 1.0)]
    found = [_scaled(best, r, w) for r, w in changes]
    counts = [limits.num_processors * k for k in (2, 8) if k * best.num_warps <= 64]
    found += [replace(best, num_stages=3, programs=n) for n in counts if n <= height]
    if best.columns >= 8192:
        found.append(Tile(TileKind.ROWS, 1, 2048, 8, num_stages=3, is_swept=True))
        found.append(Tile(TileKind.ROWS, 1, 1024, 4, num_stages=4, is_swept=True))
    return found


def _scaled(tile: Tile, rows: float, warps: float) -> Tile:
    return replace(
        tile, rows=max(1, int(tile.rows * rows)), num_warps=max(1, int(tile.num_warps * warps))
    )


def _other_swept(best: Tile) -> list[Tile]:
    sizes = ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (4096, 16))
    found = [replace(best, columns=c, num_warps=w) for c, w in sizes]
    return found + [replace(best, num_stages=s) for s in (1, 3, 4)]


def _other_carrying(best: Tile, height: int, limits: GpuLimits) -> list[Tile]:
    found = []
    for rows, per_processor in ((1, 4), (1, 6), (2, 2), (2, 3), (2, 4), (4, 2)):
        programs = min(limits.num_processors * per_processor, -(-height // rows))
        found.append(replace(best, rows=rows, programs=programs))
    return [*found, replace(best, num_warps=best.num_warps // 2), replace(best, num_stages=4)]


def _other_columns(kernel: Kernel, best: Tile, limits: GpuLimits) -> list[Tile]:
    height, width = _static(rows_of(kernel)), _static(columns_of(kernel))
    if height is None or width is None:
        return []
    shapes = ((32, 128, 8), (16, 128, 8), (64, 128, 8), (32, 256, 8), (32, 128, 4), (16, 256, 4))
    found = []
    for rows, columns, warps in shapes:
        across = -(-width // columns)
        for stages, per_processor in ((1, 32 // warps), (3, 4), (4, 2)):
            splits = max(1, min(limits.num_processors * per_processor // across, height // rows))
            found.append(Tile(TileKind.COLUMNS, rows, columns, warps, stages, splits=splits))
    return found
