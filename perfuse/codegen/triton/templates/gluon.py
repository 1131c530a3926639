"""Warp-specialised contractions in Gluon: one warp loads, two groups multiply and store.

Blocks of operands travel through a ring of stages in shared memory. A barrier for each stage says
that it is full, another that it is empty. In ping-pong each group has a tile of its own, and the
groups take turns with the matrix units: one stores its tile while the other multiplies. Cooperating
groups have one tile, which may be larger. Several right operands stand side by side in a stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from perfuse.codegen.emitter import Value
from perfuse.codegen.triton.emit import COLUMNS, ROWS, Block, Dialect, Emitter
from perfuse.codegen.triton.frame import KernelText
from perfuse.codegen.triton.sources import TensorMap
from perfuse.codegen.triton.spelling import COMPUTE_TYPE, NARROW_TYPE
from perfuse.codegen.triton.templates.frame import BOTH, ContractionFrame
from perfuse.codegen.triton.templates.maps import (
    in_memory,
    is_row_major,
    map_type,
    matrix_map,
    operand_map,
)
from perfuse.codegen.triton.templates.persistent import is_mapped, stored_places
from perfuse.codegen.triton.templates.template import COOPERATIVE, GROUP_WARPS, GROUPS, Template
from perfuse.codegen.triton.tiling import num_blocks
from perfuse.codegen.writer import Writer
from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.program import Buffer
from perfuse.schedule.contract import result_value
from perfuse.schedule.plan import Kernel

HALVES = (DType.F16, DType.BF16)

LOADER_REGISTERS = 24  # of a thread of the warp that loads, which leaves more to the others
GROUP_REGISTERS = 240

_RING = ("a_stages", "b_stages", "full", "empty")
_BARRIERS = "hopper.mbarrier.MBarrierLayout()"


@dataclass(frozen=True, slots=True)
class Ahead:
    """A load whose block is read while its tile is multiplied, into the block of a result."""

    load: Expr
    result: str


class GluonFrame(ContractionFrame):
    """One kernel in Gluon being written: a function for each role, and one that starts them."""

    def __init__(
        self, kernel: Kernel, buffers: Mapping[str, Buffer], template: Template, dialect: Dialect
    ) -> None:
        super().__init__(kernel, buffers, template, dialect)
        # The epilogue of one group takes issue slots from the other, which multiplies.
        self.names.is_brief = True

    @property
    def is_shared(self) -> bool:
        """Whether the groups share a tile."""
        return self.template.kind == COOPERATIVE

    @property
    def columns_at_once(self) -> int:
        """Columns of a stage: those of all right operands."""
        return self.template.columns * len(self.matmuls)

    @property
    def steps(self) -> str:
        return self.dim(num_blocks(self.depth(self.matmuls[0]), self.template.depth))

    @property
    def first_row(self) -> str:
        own = f" + warpgroup * {self.tile.rows}" if self.is_shared else ""
        return f"tile_row * {self.template.rows}{own}"

    # -- blocks of the epilogue ------------------------------------------------------------

    def place_block(self, w: Writer, first_column: str) -> None:
        rows = "gl.arange(0, R, layout=gl.SliceLayout(1, LAYOUT))[:, None]"
        columns = "gl.arange(0, C, layout=gl.SliceLayout(0, LAYOUT))[None, :]"
        w.line(f"row = {self.wide(self.first_row)} + {rows}")
        w.line(f"column = {self.wide(first_column)} + {columns}")

    def block(self, masks: dict[int, str]) -> Block:
        shapes = {ROWS: "[R, 1]", COLUMNS: "[1, C]", BOTH: "[R, C]"}
        zeros = {lanes: f"gl.zeros({s}, gl.int32, LAYOUT)" for lanes, s in shapes.items()}
        return replace(super().block(masks), zeros=zeros)

    @cached_property
    def ahead(self) -> Ahead | None:
        """A matrix that the epilogue reads, and the result whose block holds it until then."""
        blocks = {self.buffers[name].dtype: name for name in self.maps}
        if self.template.parts > 1:
            return None  # the block holds one part after another
        for load in self._loads():
            buffer = self.buffers[load.buffer]
            is_own = load.buffer in self.kernel.stored or load.buffer in self._made()
            if load.args or is_own or buffer.dtype not in blocks:
                continue
            if buffer.dtype in HALVES and is_mapped(buffer, load.attr[1], self.kernel):
                return Ahead(load, blocks[buffer.dtype])
        return None

    def _made(self) -> set[str]:
        return {m.loop.out for m in self.kernel.members} | {m.out for m in self.matmuls}

    def _loads(self) -> Iterator[Expr]:
        for matmul in self.matmuls:
            product = ex.load(f"{matmul.out} sum", 0, matmul.accumulate)
            formula = result_value(matmul, self.kernel, product, self.buffers)
            yield from (load for load in ex.loads_of(formula) if load is not product)
        for member in self.kernel.members:
            yield from member.loop.reads()

    def read_ahead(self, load: Expr) -> Value | None:
        is_there = self.ahead is not None and load is self.ahead.load
        return Value("ahead", DType.F32, BOTH) if is_there else None

    def store_block(self, emitter: Emitter, name: str, block: str) -> None:
        own = self.maps[name]
        at = f"{self.coordinate(self.first_row)}, {self.coordinate(self.first_column)}"
        if self.ahead is None or self.ahead.result != name:  # else it was before that was read
            emitter.line("hopper.tma.store_wait(0)")
        emitter.line(f"{own}_block.store({block})")
        emitter.line("hopper.fence_async_shared()")
        emitter.line(f"hopper.tma.async_copy_shared_to_global({own}, [{at}], {own}_block)")


def gluon_text(frame: GluonFrame) -> KernelText:
    """All tiles of a matmul, distributed over the multiprocessors round-robin."""
    for name, index in stored_places(frame.kernel, frame.buffers).items():
        if is_mapped(frame.buffers[name], index, frame.kernel):
            frame.maps[name] = f"map{len(frame.maps)}"
    multiply, load = Writer(1), Writer(1)
    _multiply(frame, multiply)
    _load(frame, load)
    own = list(frame.names.arguments.values())
    passed = [*_RING, "turns", *_stored(frame), *_ahead(frame), *own, "R", "C"]
    maps = _maps(frame)
    loads = [*_RING, *(name for name in maps if name[:2] in ("a_", "b_"))]
    _start(frame, frame.w, loads, passed)
    text = frame.text((frame.template.programs, 1, 1))
    called = (
        _function("load", loads, load),
        _function("multiply", ["warpgroup: gl.constexpr", *passed], multiply),
    )
    return replace(
        text,
        is_gluon=True,
        called="".join(called),
        parameters=(
            *text.parameters,
            *((name, map_type(made, is_gluon=True)) for name, made in maps.items()),
        ),
        maps=tuple(maps.values()),
    )


def _function(name: str, parameters: Sequence[str], body: Writer) -> str:
    typed = [f"{p}: gl.constexpr" if p in ("R", "C") else p for p in parameters]
    # Triton's own takes no layout, which a number does not have either.
    text = body.text().replace("tl.full(", "gl.full(")
    return f"\n\n@gluon.jit\ndef KERNEL_{name}({', '.join(typed)}):\n{text}"


def _stored(frame: GluonFrame) -> list[str]:
    """Tensor maps of results, and the blocks in shared memory that they store."""
    return [name for own in frame.maps.values() for name in (own, f"{own}_blocks")]


def _ahead(frame: GluonFrame) -> list[str]:
    return [] if frame.ahead is None else ["ahead_map", "arrived"]


# -- tensor maps ---------------------------------------------------------------------------


def _maps(frame: GluonFrame) -> dict[str, TensorMap]:
    """The tensor maps that a launch passes, by the names of their parameters."""
    template, first = frame.template, frame.matmuls[0].operands
    found = {"a_map": operand_map(frame, first.a, (template.rows, template.depth))}
    for k, matmul in enumerate(frame.matmuls):
        block = (template.depth, template.columns)
        found[f"b_map{k}"] = operand_map(frame, matmul.operands.b, block)
    for name, own in frame.maps.items():
        found[own] = matrix_map(frame, name)
    if frame.ahead is not None:
        found["ahead_map"] = matrix_map(frame, frame.ahead.load.buffer)
    return found


# -- the start -----------------------------------------------------------------------------


def _start(frame: GluonFrame, w: Writer, loads: list[str], passed: list[str]) -> None:
    """Shared memory and barriers, and then the roles."""
    template, first = frame.template, frame.matmuls[0].operands
    stages = template.num_stages
    rows = in_memory(first.a, (template.rows, template.depth))
    columns = in_memory(first.b, (template.depth, frame.columns_at_once))
    kinds = [_kind(frame.buffers[view.buffer].dtype) for view in (first.a, first.b)]
    _allocate(w, "a_stages", kinds[0], rows, stages, "a_map")
    _allocate(w, "b_stages", kinds[1], columns, stages, "b_map0")
    for name, own in frame.maps.items():
        block = (frame.tile.rows, frame.tile.columns)
        _allocate(w, f"{own}_blocks", _kind(frame.buffers[name].dtype), block, GROUPS, own)
    counts = {"full": stages, "empty": stages, "turns": GROUPS}
    if frame.ahead is not None:
        counts["arrived"] = GROUPS
    for name, count in counts.items():
        w.line(f"{name} = gl.allocate_shared_memory(gl.int64, [{count}, 1], {_BARRIERS})")
        arrivals = GROUPS if name == "empty" and frame.is_shared else 1
        with w.indented(f"for k in gl.static_range({count}):"):
            w.line(f"hopper.mbarrier.init({name}.index(k), count={arrivals})")
    w.line("hopper.fence_async_shared()")
    roles = [f"(KERNEL_multiply, ({g}, {', '.join(passed)}))" for g in range(GROUPS)]
    roles.append(f"(KERNEL_load, ({', '.join(loads)}))")
    shares = f"[{GROUP_WARPS}, 1], [{GROUP_REGISTERS}, {LOADER_REGISTERS}]"
    w.line(f"gl.warp_specialize([{', '.join(roles)}], {shares})")


def _allocate(
    w: Writer, name: str, kind: str, block: tuple[int, int], count: int, of: str
) -> None:  # fmt: skip
    made = f"{kind}, [{count}, {block[0]}, {block[1]}], {of}.layout"
    w.line(f"{name} = gl.allocate_shared_memory({made})")


def _kind(dtype: DType) -> str:
    return NARROW_TYPE.get(dtype) or COMPUTE_TYPE[dtype]


# -- the warp that loads -------------------------------------------------------------------


def _load(frame: GluonFrame, w: Writer) -> None:
    template, first = frame.template, frame.matmuls[0].operands
    w.line("stage = gl.to_tensor(0)")
    w.line("phase = gl.to_tensor(1)")
    rows = (template.rows + frame.columns_at_once) * template.depth
    num_bytes = rows * frame.buffers[first.a.buffer].dtype.num_bytes
    around = f"gl.program_id(0), {frame.dim(frame.tiles)}, {template.programs}"
    with w.indented(f"for tile in range({around}):"):
        frame.place_tile(w, "tile")
        with w.indented(f"for step in range({frame.steps}):"):
            w.line("hopper.mbarrier.wait(empty.index(stage), phase)")
            w.line(f"hopper.mbarrier.expect(full.index(stage), {num_bytes})")
            along = f"step * {template.depth}"
            at = in_memory(first.a, (f"tile_row * {template.rows}", along))
            _copy(w, "a_map", at, "a_stages.index(stage)")
            for k, matmul in enumerate(frame.matmuls):
                b = matmul.operands.b
                at = in_memory(b, (along, f"tile_column * {template.columns}"))
                _copy(w, f"b_map{k}", at, _part_of_stage(frame, k))
            _advance(frame, w)


def _part_of_stage(frame: GluonFrame, k: int) -> str:
    """Where the block of a right operand stands, beside the others."""
    if len(frame.matmuls) == 1:
        return "b_stages.index(stage)"
    columns, axis = frame.template.columns, in_memory(frame.matmuls[0].operands.b, (0, 1)).index(1)
    return f"b_stages.index(stage).slice({k * columns}, {columns}, dim={axis})"


def _copy(w: Writer, name: str, at: tuple[str, str], into: str) -> None:
    place = f"[{at[0]}, {at[1]}], full.index(stage)"
    w.line(f"hopper.tma.async_copy_global_to_shared({name}, {place}, {into})")


def _advance(frame: GluonFrame, w: Writer) -> None:
    """To the next stage; those of the next round have the other phase."""
    w.line("stage += 1")
    w.line(f"phase = gl.where(stage == {frame.template.num_stages}, phase ^ 1, phase)")
    w.line(f"stage = gl.where(stage == {frame.template.num_stages}, 0, stage)")


# -- the groups that multiply --------------------------------------------------------------


def _multiply(frame: GluonFrame, w: Writer) -> None:
    template, rows = frame.template, frame.tile.rows
    deep = 32 // frame.buffers[frame.matmuls[0].operands.a.buffer].dtype.num_bytes
    layout = f"gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {{}}, {deep}])"
    w.line(f"SUMS: gl.constexpr = {layout.format(frame.columns_at_once)}")
    w.line(f"LAYOUT: gl.constexpr = {layout.format(frame.tile.columns)}")
    for own in frame.maps.values():
        w.line(f"{own}_block = {own}_blocks.index(warpgroup)")
    if frame.is_shared:
        w.line("stage = gl.to_tensor(0)")
        w.line("phase = gl.to_tensor(0)")
    w.line("turn = gl.to_tensor(0)")
    programs, tiles = template.programs, frame.dim(frame.tiles)
    own = f"gl.program_id(0), {tiles}, {programs}" if frame.is_shared else (
        f"gl.program_id(0) + warpgroup * {programs}, {tiles}, {GROUPS * programs}"
    )  # fmt: skip
    with w.indented(f"for tile in range({own}):"):
        frame.place_tile(w, "tile")
        _read_ahead(frame, w)
        if not frame.is_shared:
            _take_turn(frame, w)
        w.line(f"sums = gl.zeros([{rows}, {frame.columns_at_once}], gl.float32, SUMS)")
        with w.indented(f"for step in range({frame.steps}):"):
            _step(frame, w)
        if not frame.is_shared:
            w.line("hopper.mbarrier.arrive(turns.index(1 - warpgroup))")
        w.line("sums = hopper.warpgroup_mma_wait(0, deps=[sums])")
        w.line(f"hopper.mbarrier.arrive(empty.index({_before(frame)}))")
        _finish(frame, w)
        w.line("turn += 1")
    if frame.maps:
        w.line("hopper.tma.store_wait(0)")


def _read_ahead(frame: GluonFrame, w: Writer) -> None:
    """Start to read what the epilogue needs: it arrives while the tile is multiplied."""
    if frame.ahead is None:
        return
    block, tile = f"{frame.maps[frame.ahead.result]}_block", frame.tile
    num_bytes = frame.buffers[frame.ahead.load.buffer].dtype.num_bytes * tile.rows * tile.columns
    place = f"[{frame.first_row}, tile_column * {tile.columns}], arrived.index(warpgroup), {block}"
    w.line("hopper.tma.store_wait(0)")
    w.line(f"hopper.mbarrier.expect(arrived.index(warpgroup), {num_bytes})")
    w.line(f"hopper.tma.async_copy_global_to_shared(ahead_map, {place})")


def _take_turn(frame: GluonFrame, w: Writer) -> None:
    """Wait until the other group has finished with the matrix units, and find its own stages."""
    stages = frame.template.num_stages
    w.line(f"first = (turn * {GROUPS} + warpgroup) * {frame.steps}")
    w.line(f"stage = first % {stages}")
    w.line(f"phase = first // {stages} % 2")
    w.line("hopper.mbarrier.wait(turns.index(warpgroup), (turn + 1 + warpgroup) % 2)")


def _step(frame: GluonFrame, w: Writer) -> None:
    first = frame.matmuls[0].operands
    left, right = "a_stages.index(stage)", "b_stages.index(stage)"
    if frame.is_shared:
        axis = in_memory(first.a, (0, 1)).index(0)
        left += f".slice(warpgroup * {frame.tile.rows}, {frame.tile.rows}, dim={axis})"
    left += "" if is_row_major(first.a) else ".permute([1, 0])"
    right += "" if is_row_major(first.b) else ".permute([1, 0])"
    w.line("hopper.mbarrier.wait(full.index(stage), phase)")
    w.line(f"sums = hopper.warpgroup_mma({left}, {right}, sums, is_async=True)")
    # The one before is done: its stage may be filled again.
    w.line("sums = hopper.warpgroup_mma_wait(1, deps=[sums])")
    w.line(f"hopper.mbarrier.arrive(empty.index({_before(frame)}), pred=step > 0)")
    _advance(frame, w)


def _before(frame: GluonFrame) -> str:
    last = frame.template.num_stages - 1
    return f"gl.where(stage == 0, {last}, stage - 1)"


def _finish(frame: GluonFrame, w: Writer) -> None:
    """Store the tile: its right operands, and the parts of each, are columns of the sums."""
    pieces = _split(w, "sums", len(frame.matmuls) * frame.template.parts)
    if len(pieces) > 1:
        for piece in pieces:
            w.line(f"{piece} = gl.convert_layout({piece}, LAYOUT, assert_trivial=True)")
    if frame.ahead is not None:
        block = f"{frame.maps[frame.ahead.result]}_block"
        w.line("hopper.mbarrier.wait(arrived.index(warpgroup), turn % 2)")
        w.line(f"ahead = {block}.load(LAYOUT).to(tl.float32)")
    parts = frame.template.parts
    for part in range(parts):
        frame.finish(w, pieces[part::parts], part)


def _split(w: Writer, name: str, count: int) -> list[str]:
    """Names of the columns of a block in equal shares, a power of two."""
    if count == 1:
        return [name]
    halves = [f"{name}_{k}" for k in range(2)]
    w.line(f"both = {name}.reshape([R, 2, {name}.shape[1] // 2]).permute([0, 2, 1])")
    w.line(f"{', '.join(halves)} = both.split()")
    return [piece for half in halves for piece in _split(w, half, count // 2)]
