"""Scans: values carried along a row, held whole or in steps with what came before."""

from __future__ import annotations

from perfuse.codegen.emitter import Value
from perfuse.codegen.triton.emit import COLUMNS, ROWS, Scope
from perfuse.codegen.triton.frame import KernelText, TritonFrame
from perfuse.codegen.triton.rows import Rows, RowWriter
from perfuse.codegen.triton.spelling import COMPUTE_TYPE, bare, literal, start
from perfuse.codegen.triton.tiling import num_blocks
from perfuse.ir.program import LoopKind
from perfuse.schedule.plan import Member

_COMBINE = {LoopKind.CUMSUM: "pf_add", LoopKind.CUMPROD: "pf_mul"}


def scan_text(frame: TritonFrame) -> KernelText:
    """A single loop: a row's values, each combined with all before it."""
    w = frame.w
    rows = Rows(frame)
    (m,) = frame.kernel.members
    w.line(f"block = {frame.program(0)}")
    row = rows.place_rows(w)
    if not frame.tile.is_swept:
        rows.place_columns(w, "0", row.masks)
        _scan_block(frame, row, m, None)
    else:
        kind = m.loop.value.dtype
        first = bare(start(m.loop.kind, kind), kind)
        w.line(f"before = tl.full([R, 1], {first}, {COMPUTE_TYPE[kind]})")
        width = frame.dim(rows.width)
        with w.indented(f"for start in range(0, {width}, C):"):
            masks = dict(row.masks)
            rows.place_columns(w, "start", masks)
            scope = Scope(w, frame.atoms(frame.columns), row.scope)
            inner = Scope(w, scope.variables, None)
            _scan_block(frame, RowWriter(inner, masks), m, "before")
    return frame.text((num_blocks(frame.size(frame.rows), frame.tile.rows), 1, 1))


def _scan_block(frame: TritonFrame, row: RowWriter, m: Member, before: str | None) -> None:
    block, w = frame.block(row.masks), row.scope.writer
    emitter = frame.emitter(row.scope, block, m, {})
    kind, combine = m.loop.value.dtype, _COMBINE[m.loop.kind]
    value = emitter.value(m.loop.value)
    mask, text = block.mask(COLUMNS), value.text
    if mask is not None:
        text = f"tl.where({mask}, {text}, {literal(start(m.loop.kind, kind), kind)})"
    given, running = frame.names.local(), frame.names.local()
    w.line(f"{given} = tl.broadcast_to(tl.cast({text}, {COMPUTE_TYPE[kind]}), [R, C])")
    w.line(f"{running} = tl.associative_scan({given}, 1, {combine})")
    if before is not None:
        w.line(f"{running} = {combine}({running}, {before})")
        w.line(f"{before} = {combine}({before}, tl.reduce({given}, 1, {combine}, keep_dims=True))")
    target = frame.buffers[m.loop.out].dtype.compute
    made = emitter.converted(Value(running, kind, ROWS | COLUMNS), target)
    emitter.store(m.loop.out, m.loop.index, made)
