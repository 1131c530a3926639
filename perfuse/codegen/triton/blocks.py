"""Kernels of one sweep: flat blocks, transposed tiles, column sums, scatters."""

from __future__ import annotations

from perfuse.codegen.emitter import Value
from perfuse.codegen.triton.carry import Carry, joins_itself
from perfuse.codegen.triton.emit import COLUMNS, ROWS, Block, Scope
from perfuse.codegen.triton.frame import KernelText, TritonFrame
from perfuse.codegen.triton.spelling import COMPUTE_TYPE
from perfuse.codegen.triton.tiling import num_blocks
from perfuse.codegen.writer import Writer
from perfuse.ir import index as ix
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis, LoopKind
from perfuse.schedule.plan import Role
from perfuse.schedule.transposed import tall_axis


def flat_text(frame: TritonFrame) -> KernelText:
    """Elements by flat position; whole-tensor reductions use persistent blocks and are combined."""
    w, tile = frame.w, frame.tile
    total = frame.size(frame.kernel.axes)
    blocks = num_blocks(total, tile.columns)
    programs = tile.programs
    carry = Carry(frame, "[C]", programs or 1)
    carry.declare(w)
    if programs is None:
        w.line(f"start = {frame.program(0)} * C")
        _flat_body(frame, w, None)
        return frame.text((blocks, 1, 1))
    around, loop = Scope(w, frozenset(), None), w.child()  # scalars are read before the loop
    step, first = f"{programs} * C", f"{frame.program(0)} * C"
    with loop.indented(
        f"for start in tl.range({first}, {frame.dim(total)}, {step}, num_stages={tile.num_stages}):"
    ):
        _flat_body(frame, loop, around)
    w.take(loop)
    carry.finish_all(w, "tl.program_id(0)", programs, [0])
    return frame.text((programs, 1, 1))


def _flat_block(frame: TritonFrame, w: Writer) -> Block:
    """The block of a flat index: all axes vary along its one kind of lane."""
    total = frame.size(frame.kernel.axes)
    w.line("at = start + tl.arange(0, C)")
    masks: dict[int, str] = {}
    frame.mask_end(w, masks, "inside", "at", total, frame.tile.columns)
    frame.place_axes(w, frame.kernel.axes, "at")
    lanes_of = dict.fromkeys(frame.atoms(frame.kernel.axes), ROWS)
    return Block(lanes_of, masks, {ROWS: "tl.zeros([C], tl.int32)"})


def grouped_text(frame: TritonFrame) -> KernelText:
    """Elements by their flat position, in groups of neighbours along the last axis.

    What does not vary along that axis is computed once per group: a division, a row's scale.
    """
    w, tile = frame.w, frame.tile
    *outer, last = [a for a in frame.kernel.axes if a.atom is not None]
    groups = ix.floordiv(last.size, tile.columns)
    total = ix.mul(frame.size(outer), groups)
    w.line(f"at = {frame.program(0)} * R + tl.arange(0, R)[:, None]")
    masks: dict[int, str] = {}
    frame.mask_end(w, masks, "in_rows", "at", total, tile.rows)
    w.line(f"{last.name} = at % ({frame.dim(groups)}) * C + tl.arange(0, C)[None, :]")
    frame.place_axes(w, outer, f"at // ({frame.dim(groups)})")
    lanes_of = dict.fromkeys(frame.atoms(outer), ROWS)
    lanes_of |= dict.fromkeys(frame.atoms([last]), ROWS | COLUMNS)
    block = Block(lanes_of, masks, frame.block({}).zeros)
    _emit_members(frame, _innermost(frame, w), block)
    return frame.text((num_blocks(total, tile.rows), 1, 1))


def stacked_text(frame: TritonFrame) -> KernelText:
    """Blocks of the inner axes for several steps of the first: what is the same is read once."""
    w, tile = frame.w, frame.tile
    first, *inner = [a for a in frame.kernel.axes if a.atom is not None]
    across, down = num_blocks(frame.size(inner), tile.columns), num_blocks(first.size, tile.rows)
    w.line(f"program = {frame.program(0)}")
    w.line(f"at = program // ({frame.dim(down)}) * C + tl.arange(0, C)[None, :]")
    w.line(f"{first.name} = program % ({frame.dim(down)}) * R + tl.arange(0, R)[:, None]")
    frame.place_axes(w, inner, "at")
    lanes_of = dict.fromkeys(frame.atoms([first]), ROWS)
    lanes_of |= dict.fromkeys(frame.atoms(inner), COLUMNS)
    block = Block(lanes_of, {}, frame.block({}).zeros)
    _emit_members(frame, _innermost(frame, w), block)
    return frame.text((ix.mul(across, down), 1, 1))


def _innermost(frame: TritonFrame, w: Writer, around: Scope | None = None) -> Scope:
    """The scope in which all axes are known."""
    return Scope(w, frame.atoms(frame.kernel.axes), around)


def _emit_members(frame: TritonFrame, scope: Scope, block: Block) -> None:
    """Every member that is kept or reduced, for all lanes of a block of rows and columns."""
    made: dict[str, Value] = {}
    for m in frame.kernel.members:
        emitter = frame.emitter(scope, block, m, made)
        if m.role in (Role.OUTER, Role.ALL):
            mask = block.mask(ROWS if m.role == Role.OUTER else ROWS | COLUMNS)
            frame.step(emitter, m, frame.lanes_text(emitter, m, mask, "[R, C]", ""))
        elif m.loop.out in frame.kernel.stored:
            made[m.loop.out] = frame.stored(emitter, m, ROWS | COLUMNS)


def _flat_body(frame: TritonFrame, w: Writer, around: Scope | None) -> None:
    block = _flat_block(frame, w)
    flat_members(frame, Scope(w, frame.atoms(frame.kernel.axes), around), block)


def flat_members(frame: TritonFrame, scope: Scope, block: Block) -> None:
    """Emit the stores and reductions of a kernel, for one block of flat positions."""
    made: dict[str, Value] = {}
    for m in frame.kernel.members:
        emitter = frame.emitter(scope, block, m, made)
        if m.role == Role.ALL:
            frame.step(emitter, m, frame.lanes_text(emitter, m, block.mask(ROWS), "[C]", ""))
        elif m.loop.out in frame.kernel.stored:
            made[m.loop.out] = frame.stored(emitter, m, ROWS)


def scatter_text(frame: TritonFrame) -> KernelText:
    """Each element goes to the position that data gives, stored or added."""
    total = frame.size(frame.kernel.axes)
    frame.w.line(f"start = {frame.program(0)} * C")
    block = _flat_block(frame, frame.w)
    scope = Scope(frame.w, frame.atoms(frame.kernel.axes), None)
    (m,) = frame.kernel.members
    emitter = frame.emitter(scope, block, m, {})
    if m.loop.kind is not LoopKind.SCATTER_ADD:
        frame.stored(emitter, m, ROWS)
    else:
        value = frame.value_of(emitter, m)
        address, _ = emitter.place(m.loop.out, m.loop.index, ROWS)
        mask = block.mask(ROWS)
        inside = "" if mask is None else f", {mask}"
        wide = f"tl.broadcast_to(tl.cast({value.text}, {COMPUTE_TYPE[value.dtype]}), [C])"
        emitter.line(f"tl.atomic_add({address}, {wide}{inside}, sem='relaxed')")
    return frame.text((num_blocks(total, frame.tile.columns), 1, 1))


def transposed_text(frame: TritonFrame) -> KernelText:
    """Tiles of the last axis and the one that runs fastest elsewhere: both sides are contiguous."""
    w, tile = frame.w, frame.tile
    total, programs = _num_tiles(frame), tile.programs
    if programs is None:
        w.line(f"program = {frame.program(0)}")
        _emit_members(frame, _innermost(frame, w), _transposed_block(frame, w))
        return frame.text((total, 1, 1))
    carry = Carry(frame, "[R, C]", programs)
    carry.declare(w)
    around, loop = Scope(w, frozenset(), None), w.child()  # scalars are read before the loop
    bounds = f"{frame.program(0)}, {frame.dim(total)}, {programs}"
    with loop.indented(f"for program in tl.range({bounds}, num_stages={tile.num_stages}):"):
        block = _transposed_block(frame, loop)
        _emit_members(frame, _innermost(frame, loop, around), block)
    w.take(loop)
    carry.finish_all(w, "tl.program_id(0)", programs, [1, 0])
    return frame.text((programs, 1, 1))


def _tile_axes(frame: TritonFrame) -> tuple[Axis, Axis, tuple[Axis, ...]]:
    """The axes of the rows and columns of transposed tiles, and the others."""
    tall, wide = tall_axis(frame.kernel), frame.kernel.axes[-1]
    assert tall is not None
    return tall, wide, tuple(a for a in frame.kernel.axes[:-1] if a is not tall)


def _num_tiles(frame: TritonFrame) -> Dim:
    tall, wide, others = _tile_axes(frame)
    across, down = num_blocks(wide.size, frame.tile.columns), num_blocks(tall.size, frame.tile.rows)
    return ix.mul(ix.mul(across, down), frame.size(others))


def _transposed_block(frame: TritonFrame, w: Writer) -> Block:
    """The block of tile number `program`."""
    tall, wide, others = _tile_axes(frame)
    assert tall.atom is not None and wide.atom is not None
    across, down = num_blocks(wide.size, frame.tile.columns), num_blocks(tall.size, frame.tile.rows)
    w.line(f"band = program // ({frame.dim(across)})")
    w.line(f"{wide.name} = program % ({frame.dim(across)}) * C + tl.arange(0, C)[None, :]")
    w.line(f"{tall.name} = band % ({frame.dim(down)}) * R + tl.arange(0, R)[:, None]")
    frame.place_axes(w, others, f"band // ({frame.dim(down)})")
    masks: dict[int, str] = {}
    frame.mask_end(w, masks, "in_rows", tall.name, tall.size, frame.tile.rows)
    frame.mask_end(w, masks, "in_columns", wide.name, wide.size, frame.tile.columns)
    return Block({tall.atom: ROWS, wide.atom: COLUMNS}, masks, frame.block({}).zeros)


def columns_text(frame: TritonFrame) -> KernelText:
    """Blocks of columns run down their share of the rows."""
    w, tile = frame.w, frame.tile
    width, height = frame.size(frame.columns), frame.size(frame.rows)
    across = num_blocks(width, tile.columns)
    carry = Carry(frame, "[R, C]", tile.splits)
    masks: dict[int, str] = {}
    w.line(f"column = {frame.program(0)} * C + tl.arange(0, C)[None, :]")
    frame.mask_end(w, masks, "in_columns", "column", width, tile.columns)
    frame.place_axes(w, frame.columns, "column")
    carry.declare(w)
    bounds = f"{frame.program(1)} * R, {frame.dim(height)}, R * {tile.splits}"
    around, loop = Scope(w, frame.atoms(frame.columns), None), w.child()
    with loop.indented(f"for first in tl.range({bounds}, num_stages={tile.num_stages}):"):
        loop.line("row = first + tl.arange(0, R)[:, None]")
        frame.mask_end(loop, masks, "in_rows", "row", height, tile.rows)
        frame.place_axes(loop, frame.rows, "row")
        block = frame.block(masks)
        _emit_members(frame, _innermost(frame, loop, around), block)
    w.take(loop)
    columns = frame.block({k: v for k, v in masks.items() if k == COLUMNS})
    carry.finish_columns(w, columns, "tl.program_id(1)", "column", width)
    if joins_itself(tile, width):
        carry.join_here(w, columns, width)
    everyone = ix.mul(across, tile.splits)
    number = f"tl.program_id(1) * ({frame.dim(across)}) + tl.program_id(0)"
    carry.finish_all(w, number, everyone, [1, 0])
    return frame.text((across, tile.splits, 1))
