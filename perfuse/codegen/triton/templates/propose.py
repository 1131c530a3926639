"""Candidates: the templates that can compute a contraction, the most promising first.

What cannot be right or cannot fit is left out before anything is compiled. The rest is ranked by a
model of an H200, whose constants were fitted to 970 measured candidates and scale with the GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import ceil, prod, sqrt

from perfuse.codegen.triton.sources import SWIZZLED_BYTES
from perfuse.codegen.triton.templates.maps import is_row_major
from perfuse.codegen.triton.templates.persistent import is_mappable
from perfuse.codegen.triton.templates.pointers import phases
from perfuse.codegen.triton.templates.template import (
    COOPERATIVE,
    GROUPS,
    MAPPED,
    PERSISTENT,
    PING_PONG,
    POINTERS,
    SPECIALISED,
    VECTOR,
    Template,
)
from perfuse.gpu import Gpu, Platform
from perfuse.ir.dtype import DType
from perfuse.ir.program import Buffer, Matmul
from perfuse.schedule.contract import depth_of, sizes_of
from perfuse.schedule.plan import Kernel
from perfuse.schedule.size_hints import Hints, value_of

MOST = 8  # among the first eight is one within 1 % of the best of all
FEW_ROWS = 16
_OF_EACH_PRECISION = 3
WARP_REGISTERS = 255  # of a thread
_OWN_REGISTERS = 56  # of a thread, for addresses and the epilogue

HALVES = (DType.F16, DType.BF16)
MULTIPLIED = (*HALVES, DType.F32, DType.I8)
# Floats of eight bits in which operands may differ; the matrix units of a GPU have one of the two.
OCP_FLOATS = frozenset({DType.F8E4M3FN, DType.F8E5M2})
FNUZ_FLOATS = frozenset({DType.F8E4M3FNUZ, DType.F8E5M2FNUZ})
# Every value of these fits both half types: no product of them rounds.
WIDENED = (DType.I8, DType.U8)

# Rows, columns, depth, warps, stages.
_HALF_BLOCKS = (
    (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3),
    (128, 128, 32, 4, 4), (64, 256, 64, 8, 3), (64, 256, 64, 4, 4), (128, 64, 64, 4, 4),
    (64, 128, 64, 4, 4), (64, 128, 128, 4, 3), (64, 64, 64, 4, 4), (64, 64, 128, 4, 4),
    (32, 64, 128, 4, 4), (32, 128, 64, 4, 4), (16, 64, 128, 4, 4), (16, 128, 128, 4, 4),
)  # fmt: skip
_FLOAT_BLOCKS = (
    (128, 128, 16, 8, 3), (128, 64, 32, 4, 2), (64, 128, 32, 4, 2), (64, 64, 32, 4, 3),
    (64, 32, 32, 2, 3), (32, 64, 32, 4, 3), (32, 32, 32, 2, 3), (16, 64, 64, 4, 3),
)  # fmt: skip
_PERSISTENT_BLOCKS = (
    (128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4),
)  # fmt: skip
_TILE_BLOCKS = (
    (128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (64, 128, 128, 4, 4),
    (64, 128, 64, 4, 4), (64, 256, 64, 4, 4), (64, 64, 128, 4, 4),
)  # fmt: skip
# Rows, columns of all right operands, depth, stages, parts: of each size, the best first. More
# stages are faster, also where they leave memory for a part of the result only (H200).
_PING_PONG_BLOCKS = (
    (128, 128, 64, 6, 2), (128, 128, 64, 5, 1), (128, 128, 64, 4, 2), (64, 128, 64, 8, 1),
    (64, 128, 64, 6, 1),
)  # fmt: skip
_COOPERATIVE_BLOCKS = (
    (128, 256, 64, 4, 2), (128, 256, 64, 3, 2), (256, 128, 64, 4, 2), (128, 128, 64, 6, 1),
    (128, 128, 64, 4, 1),
)  # fmt: skip
_OF_EACH_SIZE = {PING_PONG: 2, COOPERATIVE: 1}
_LARGEST_BARRIERS = 1024  # bytes of shared memory for barriers and what the roles are passed
_SPLITS = (2, 4, 8, 16)
_MOST_PROGRAMS = 65535  # along the second axis of a grid


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractionFacts:
    """A contraction in numbers; dynamic sizes are likely ones."""

    batch: int
    rows: int
    columns: int
    depths: tuple[int, ...]  # of each loop over depth
    num_accumulators: int
    dtype: DType
    is_static: bool
    is_mappable: bool  # tensor maps can describe the operands
    is_joined: bool  # one left operand, and right ones that can stand side by side
    along_depth: bool  # the second operand runs along the depth in memory
    stored_bytes: int  # of all results, for one element
    has_fast_sums: bool = False  # products of eight bits may be summed in fewer than 32

    @property
    def item_bytes(self) -> int:
        return self.dtype.num_bytes

    @property
    def items_for_a_half(self) -> int:
        """Elements of an operand in the bytes of a half: blocks of bytes are as much deeper."""
        return max(1, 2 // self.item_bytes)


def is_mixed(matmul: Matmul, buffers: Mapping[str, Buffer]) -> bool:
    """Whether one operand is in half precision, and the other in bytes that are widened on load."""
    a, b = (buffers[view.buffer].dtype for view in (matmul.operands.a, matmul.operands.b))
    return (a in HALVES and b in WIDENED) or (a in WIDENED and b in HALVES)


def facts_of(
    kernel: Kernel, buffers: Mapping[str, Buffer], hints: Hints
) -> ContractionFacts | None:
    """The numbers of a kernel's contraction; None where no template computes it."""
    assert kernel.contraction is not None
    matmuls = kernel.contraction.matmuls
    views = [view for m in matmuls for view in (m.operands.a, m.operands.b)]
    kinds = {buffers[view.buffer].dtype for view in views}
    are_mixed = all(is_mixed(matmul, buffers) for matmul in matmuls)
    dtype = _multiplied(kinds - set(WIDENED) if are_mixed else kinds)
    if dtype is None:
        return None
    *batch, rows, columns = (value_of(size, hints) for size in sizes_of(matmuls[0]))
    dims = [dim for view in views for dim in (*view.shape, *view.strides)]
    loops, orders = phases(matmuls), {is_row_major(m.operands.b) for m in matmuls}
    return ContractionFacts(
        batch=prod(batch),
        rows=rows,
        columns=columns,
        depths=tuple(value_of(depth_of(matmuls[loop[0]]), hints) for loop in loops),
        num_accumulators=len(matmuls),
        dtype=dtype,
        is_static=all(isinstance(dim, int) for dim in dims),
        is_mappable=not are_mixed
        and all(is_mappable(view, dtype) for view in views)
        and not (dtype.is_float8 and not all(map(_runs_along_depth, matmuls))),
        is_joined=len(loops) == 1 and len(orders) == 1,
        along_depth=matmuls[0].operands.b.strides[-2] == 1,
        stored_bytes=sum(buffers[name].dtype.num_bytes for name in kernel.stored),
        has_fast_sums=all(matmul.has_fast_sums for matmul in matmuls),
    )


def _multiplied(kinds: Set[DType]) -> DType | None:
    """The type that operands of these are multiplied in; None where no template does it."""
    if kinds <= OCP_FLOATS or kinds <= FNUZ_FLOATS:
        return min(kinds, key=str)
    (*others, first) = kinds
    return first if first in MULTIPLIED and not others else None


def _runs_along_depth(matmul: Matmul) -> bool:
    """Whether both operands are contiguous along the depth: others are not multiplied as bytes."""
    return matmul.operands.a.strides[-1] == 1 and matmul.operands.b.strides[-2] == 1


def multiplies(gpu: Gpu, dtype: DType) -> bool:
    """Whether the matrix units of a GPU have a type; those of eight bits are not everywhere."""
    if not dtype.is_float8:
        return True
    if gpu.kind is Platform.CUDA:
        return dtype in OCP_FLOATS and gpu.capability >= 89
    own = {"gfx94": FNUZ_FLOATS, "gfx95": OCP_FLOATS}.get(gpu.arch[:5])
    return own is not None and dtype in own


def proposed(
    facts: ContractionFacts, gpu: Gpu, precisions: tuple[str, ...], most: int = MOST
) -> list[Template]:
    """The most promising templates; `precisions` are those that float32 may be multiplied in."""
    if 0 in (facts.batch, facts.rows, facts.columns) or not multiplies(gpu, facts.dtype):
        return []  # nothing to compute, or nothing to compute it with
    model = Model.of(gpu)
    every = (_fitted(t, facts, gpu) for t in _all(facts, gpu, precisions))
    legal = [t for t in every if not why_too_large(t, facts, gpu)]
    ranked = list(dict.fromkeys(sorted(legal, key=lambda t: model.seconds(t, facts))))
    return _of_each_precision(ranked) if facts.dtype is DType.F32 else ranked[:most]


def _of_each_precision(ranked: Sequence[Template]) -> list[Template]:
    """As many of each precision: which of them is exact enough is known once they have run."""
    kinds = dict.fromkeys(template.precision for template in ranked)
    each = MOST if len(kinds) == 1 else _OF_EACH_PRECISION
    return [t for kind in kinds for t in [t for t in ranked if t.precision == kind][:each]]


# -- what there is -------------------------------------------------------------------------


def _all(facts: ContractionFacts, gpu: Gpu, precisions: tuple[str, ...]) -> Iterator[Template]:
    is_float = facts.dtype is DType.F32
    if facts.rows == 1 and facts.batch == 1 and facts.dtype.is_float:
        yield from _vectors(facts)
    is_narrow = facts.dtype in HALVES or facts.dtype.is_float8
    is_new = gpu.capability >= 90 and is_narrow  # tensor maps, in sizes known now
    if is_new and facts.is_mappable and facts.is_static:
        # The matrix instructions of groups of warps are those of one generation.
        yield from _specialised(facts, gpu) if gpu.capability == 90 else ()
        yield from _mapped(facts, gpu)
    for rows, columns, depth, warps, stages in _FLOAT_BLOCKS if is_float else _HALF_BLOCKS:
        if rows > max(16, _rounded(facts.rows)) or columns > max(64, _rounded(facts.columns)):
            continue
        deep = depth * facts.items_for_a_half
        plain = Template(POINTERS, rows, columns, deep, warps, stages)
        for precision in precisions if is_float else ("",):
            yield from _split(replace(plain, precision=precision), facts, gpu)
    if facts.rows <= FEW_ROWS and is_narrow:
        deep = 128 * facts.items_for_a_half
        for columns, stages in ((64, 4), (128, 4), (64, 5)):
            yield Template(POINTERS, 16, columns, deep, 4, stages, is_swapped=True)
            if is_new and facts.is_mappable and facts.is_static:
                yield Template(MAPPED, 16, columns, deep, 4, stages, is_swapped=True)


def _rounded(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _vectors(facts: ContractionFacts) -> Iterator[Template]:
    """Long runs along the depth where it is contiguous, else wide ones of shared depth."""
    if facts.along_depth:
        for columns, depth in ((2, 2048), (1, 2048), (4, 1024), (8, 512)):
            yield Template(VECTOR, 1, columns, depth, 4, 1)
        return
    for columns, depth, splits in ((128, 64, 16), (128, 64, 8), (256, 32, 16), (128, 64, 4)):
        is_shared = facts.is_static and facts.depths[0] >= 2 * depth * splits
        yield Template(VECTOR, 1, columns, depth, 4, 1, splits=splits if is_shared else 1)


def _mapped(facts: ContractionFacts, gpu: Gpu) -> Iterator[Template]:
    for rows, columns, depth, warps, stages in _TILE_BLOCKS:
        if rows > max(64, _rounded(facts.rows)) or columns > max(64, _rounded(facts.columns)):
            continue
        depth, parts = depth * facts.items_for_a_half, 2 if columns > 128 else 1
        for made in _split(Template(MAPPED, rows, columns, depth, warps, stages), facts, gpu):
            yield replace(made, parts=parts if made.splits == 1 else 1)
    for rows, columns, depth, warps, stages in _PERSISTENT_BLOCKS if facts.batch == 1 else ():
        tiles = ceil(facts.rows / rows) * ceil(facts.columns / columns)
        programs = min(gpu.multiprocessors, tiles) if facts.is_static else gpu.multiprocessors
        if facts.is_static and tiles <= gpu.multiprocessors:
            continue  # one tile per program
        depth *= facts.items_for_a_half
        yield Template(PERSISTENT, rows, columns, depth, warps, stages, programs=programs, parts=2)


def _specialised(facts: ContractionFacts, gpu: Gpu) -> Iterator[Template]:
    """Kernels whose warps have roles: right operands share the columns of a block."""
    beside, found = facts.num_accumulators, Counter[tuple[str, int, int]]()
    if facts.batch != 1 or not facts.is_joined or beside not in (1, 2, 4):
        return
    if facts.dtype.is_float8 and not facts.has_fast_sums:
        return  # sums of a step would have to be awaited before they are added
    tables = {PING_PONG: _PING_PONG_BLOCKS, COOPERATIVE: _COOPERATIVE_BLOCKS}
    for kind, block in ((kind, block) for kind, table in tables.items() for block in table):
        rows, wide, depth, stages, parts = block
        columns, warps = wide // beside, 4 if kind == PING_PONG else 8
        depth *= facts.items_for_a_half
        if rows > max(64, _rounded(facts.rows)) or columns > max(64, _rounded(facts.columns)):
            continue
        made = Template(kind, rows, columns, depth, warps, stages, parts=1 if beside > 1 else parts)
        tiles = num_tiles(made, facts)
        takes_turns = kind == COOPERATIVE or tiles > gpu.multiprocessors
        is_wide = made.tile.columns * max(2, facts.item_bytes) >= SWIZZLED_BYTES
        is_wanted = found[kind, rows, wide] < _OF_EACH_SIZE[kind]
        if takes_turns and is_wide and is_wanted and not why_too_large(made, facts, gpu):
            found[kind, rows, wide] += 1
            yield replace(made, programs=min(gpu.multiprocessors, tiles))


def _split(plain: Template, facts: ContractionFacts, gpu: Gpu) -> Iterator[Template]:
    """The template, and with its depth shared by several programs where tiles are few."""
    yield plain
    tiles = num_tiles(plain, facts)
    for splits in _SPLITS if facts.is_static else ():
        fills = tiles * splits <= 2 * gpu.multiprocessors and tiles <= _MOST_PROGRAMS
        if fills and min(facts.depths) >= 4 * splits * plain.depth:
            yield replace(plain, splits=splits)


def num_tiles(template: Template, facts: ContractionFacts) -> int:
    down, across = facts.rows / template.rows, facts.columns / template.columns
    return facts.batch * ceil(down) * ceil(across)


# -- what fits -----------------------------------------------------------------------------


def shared_bytes(template: Template, facts: ContractionFacts) -> int:
    """Shared memory of a block: operands on their way, and a part of the result to be stored."""
    if template.kind == VECTOR:
        return 0
    columns = template.columns * _loads_at_once(facts)
    step = (template.rows + columns) * template.depth * facts.item_bytes
    if template.kind in SPECIALISED:
        stored = GROUPS * template.tile.rows * template.tile.columns * facts.stored_bytes
        return step * template.num_stages + stored + _LARGEST_BARRIERS
    if template.kind in (PERSISTENT, MAPPED):
        stored = template.rows * template.columns // template.parts * facts.stored_bytes
        return step * template.num_stages + stored
    return step * max(
        1, template.num_stages - 1 if facts.dtype is DType.F32 else template.num_stages
    )


def _fitted(template: Template, facts: ContractionFacts, gpu: Gpu) -> Template:
    """Less on its way at once, where a block has less memory than an H200's."""
    while shared_bytes(template, facts) > gpu.shared_bytes and template.kind == POINTERS:
        if template.num_stages > 2:
            template = replace(template, num_stages=template.num_stages - 1)
        elif template.depth > 32:
            template = replace(template, depth=template.depth // 2)
        else:
            break
    return template


def _loads_at_once(facts: ContractionFacts) -> int:
    return ceil(facts.num_accumulators / len(facts.depths))


def registers(template: Template, facts: ContractionFacts, gpu: Gpu) -> int:
    """Registers of a thread: its share of the accumulators, and some of its own."""
    threads = template.num_warps * gpu.warp
    if template.kind == VECTOR:
        return (
            template.depth * template.columns * facts.num_accumulators // threads + _OWN_REGISTERS
        )
    held = template.rows * template.columns * facts.num_accumulators
    if facts.dtype.is_float8 and not facts.has_fast_sums and gpu.capability == 90:
        held += template.rows * template.columns  # the sums of a step, until they are added
    return held // threads + _OWN_REGISTERS


def why_too_large(template: Template, facts: ContractionFacts, gpu: Gpu) -> str:
    """Why a template cannot be built for a GPU; empty if it can."""
    if shared_bytes(template, facts) > gpu.shared_bytes:
        return "more shared memory than a block has"
    if registers(template, facts, gpu) > WARP_REGISTERS:
        return "more accumulators than a thread has registers"
    return ""


# -- the model -----------------------------------------------------------------------------

_STEP_S = 0.04e-6  # of a step of the pipeline
_LATENCY_S = 0.83e-6  # of memory
_JOIN_S = 1.7e-6  # for programs that share a tile to meet
_LAUNCH_S = 2.4e-6
_SHARE = 0.75  # of the stated peaks that is reached
_STORE_BYTES_S = 5.5e10  # of a multiprocessor
_LOAD_BYTES_S = 1.2e11
_VECTOR_SHARE = 0.9  # one row, read once: nothing waits for matrix units
_HIDDEN = 0.1  # of the shorter of computing and moving
# Of the rate of halves in matrix units. bf16x6 is six products of halves, and so on.
_RATES = {"tf32": 0.5, "tf32x3": 0.5 / 3, "bf16x6": 1 / 6}
_FULL_BLOCK = 64 * 64  # elements of a block of float32 that keeps the units busy
_POINTERS_SLOWDOWN = 1.12  # addresses take instructions, which tensor maps do not


@dataclass(frozen=True, slots=True)
class Model:
    """Predicts the time of a template: steps of a tile, waves of tiles, and memory."""

    gpu: Gpu
    flops: float  # a second, of halves, in one multiprocessor
    scalar_flops: float
    bytes_per_s: float

    @staticmethod
    def of(gpu: Gpu) -> Model:
        count = gpu.multiprocessors
        share = _SHARE * gpu.flops_f16 / count
        return Model(gpu, share, _SHARE * gpu.flops_f32 / count, _SHARE * gpu.bandwidth)

    def seconds(self, template: Template, facts: ContractionFacts) -> float:
        """The predicted time of a launch."""
        moved = self._moved(facts) / self.bytes_per_s
        if template.kind == VECTOR:
            # Wide loads are what counts; few programs leave memory idle.
            programs = num_tiles(template, facts) * template.splits
            idle = max(1.0, 2 * self.gpu.multiprocessors / programs)
            return _VECTOR_SHARE * (_LAUNCH_S + moved * idle)
        computed = self._tiles(template, facts)
        # Where one of the two decides, the other still tells candidates apart.
        return _LAUNCH_S + max(computed, moved) + _HIDDEN * min(computed, moved)

    def _moved(self, facts: ContractionFacts) -> int:
        operands = sum(facts.depths) * (facts.rows + facts.columns) * facts.item_bytes
        results = facts.rows * facts.columns * facts.stored_bytes
        return facts.batch * (operands + results)

    def _tiles(self, template: Template, facts: ContractionFacts) -> float:
        count, tiles = self.gpu.multiprocessors, num_tiles(template, facts)
        is_persistent = template.kind in (PERSISTENT, *SPECIALISED)
        units = tiles * template.splits
        occupancy = 1 if is_persistent else self._occupancy(template, facts)
        sharing = 1 if is_persistent else min(occupancy, ceil(units / count))
        steps = sum(ceil(ceil(d / template.depth) / template.splits) for d in facts.depths)
        step = self._step(template, facts, sharing)
        stored = max(2, facts.stored_bytes) * template.rows * template.columns / _STORE_BYTES_S
        if is_persistent:
            hidden = 4 if template.kind == PING_PONG else 2
            return ceil(tiles / count) * (steps * step + stored / hidden) + _LATENCY_S
        total = ceil(units / (count * occupancy)) * (steps * step + _LATENCY_S + stored)
        return total if template.splits == 1 else total + _JOIN_S + template.splits * stored

    def _step(self, template: Template, facts: ContractionFacts, sharing: int) -> float:
        accumulators = _loads_at_once(facts)
        flops = 2 * template.rows * template.columns * template.depth * accumulators
        block = (template.rows + template.columns * accumulators) * template.depth
        slow = _POINTERS_SLOWDOWN if template.kind == POINTERS else 1.0
        return max(
            slow * sharing * flops / self._rate(template, facts),
            slow * sharing * block * facts.item_bytes / _LOAD_BYTES_S,
            _LATENCY_S / max(1, template.num_stages - 1) + _STEP_S,
        )

    def _rate(self, template: Template, facts: ContractionFacts) -> float:
        if facts.dtype is DType.I8:
            return 2 * self.flops
        if facts.dtype is not DType.F32:
            is_low = template.rows < 64 and not template.is_swapped  # the older instructions
            # Those widen FP8 to half precision.
            return self.flops / 2 if is_low else self.flops * facts.items_for_a_half
        # Small blocks read their operands from shared memory, and convert them, more often.
        reuse = min(1.0, sqrt(template.rows * template.columns / _FULL_BLOCK))
        share = _RATES.get(template.precision)
        return reuse * (self.scalar_flops if share is None else self.flops * share)

    def _occupancy(self, template: Template, facts: ContractionFacts) -> int:
        gpu, threads = self.gpu, template.num_warps * self.gpu.warp
        by_memory = gpu.shared_bytes // max(1, shared_bytes(template, facts))
        by_registers = gpu.registers // (threads * registers(template, facts, gpu))
        return max(1, min(by_memory, by_registers, gpu.max_threads // threads))


def moved_seconds(num_bytes: int, gpu: Gpu) -> float:
    """The predicted time of a kernel that does nothing but move bytes."""
    return _LAUNCH_S + num_bytes / Model.of(gpu).bytes_per_s
