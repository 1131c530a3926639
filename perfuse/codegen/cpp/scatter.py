"""Scatters: stores at data-dependent positions."""

from __future__ import annotations

from perfuse.codegen.cpp.emit import Emitter, Scope
from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.writer import Writer
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.program import ARGUMENTS, Axis, LoopKind
from perfuse.schedule.plan import Member


def scatter_item(frame: CppFrame, w: Writer) -> None:
    """The steps that may write the same element, one after another."""
    shape = frame.shape
    loops = [a for a in shape.columns if a.atom is not None and a is not shape.lane_axis]
    with w.blocks(frame.loop_over(a) for a in loops):
        known = frozenset(a.atom for a in (*shape.rows, *loops) if a.atom is not None)
        if shape.lane_axis is None:
            _scatter_step(frame, Scope(w, known, None), None)
            return
        before, loop = w.child(), w.child()
        _scatter_lanes(frame, loop, Scope(before, known, None), shape.lane_axis)
        w.take(before)
        w.take(loop)


def _scatter_lanes(frame: CppFrame, w: Writer, outside: Scope, axis: Axis) -> None:
    assert axis.atom is not None
    name, lanes, block = axis.name, frame.lanes, frame.shape.block
    total, start = f"int64_t({frame.dim(axis.size)})", "0"
    known = frozenset({axis.atom})
    with w.block("{"):
        if block is not None:
            w.line(f"const int64_t last = first + {block} < {total} ? first + {block} : {total};")
            total, start = "last", "first"
        w.line(f"int64_t at_{name} = {start};")
        with w.block(f"for (; at_{name} + {lanes} <= {total}; at_{name} += {lanes}) {{"):
            w.line(f"const int64_t {name} = at_{name};")
            _scatter_step(frame, Scope(w, known, outside), None)
        with w.block(f"if (at_{name} < {total}) {{"):
            w.line(f"const int64_t {name} = at_{name};")
            w.line(f"const int live = (int)({total} - {name});")
            _scatter_step(frame, Scope(w, known, outside), "live")


def _scatter_step(frame: CppFrame, scope: Scope, tail: str | None) -> None:
    (m,) = frame.kernel.members
    lane, out = frame.shape.lane, m.loop.out
    emitter = Emitter(frame.names, scope, lane, tail, lambda e: None)
    value = frame.value_of(emitter, m)
    _stop_if_outside(frame, emitter, m)
    if m.loop.kind is not LoopKind.SCATTER_ADD:
        emitter.store(out, m.loop.index, value)
        return
    pointer, kind = frame.names.target(out), frame.names.storage(out)
    add = "pf::lor" if frame.buffers[out].dtype is DType.BOOL else "pf::add"
    stride = 0 if lane is None else ix.coefficient_of(m.loop.index, lane)
    if lane is None or stride == 1:
        at = emitter.index(m.loop.index)
        emitter.update(f"{pointer} + {at}", kind, add, value)
        return
    index, is_vector = emitter.lane_index(m.loop.index)
    at = index if is_vector else f"pf::splat(int64_t({index}))"
    live = tail or "pf::lanes"
    emitter.line(f"pf::scatter_add_n<{kind}>({pointer}, {at}, {value.vector}, {live});")


def _stop_if_outside(frame: CppFrame, emitter: Emitter, member: Member) -> None:
    """Leave memory of the caller as it is from an index on that is out of bounds, as eager does."""
    atoms = ex.value_atoms(member.loop.index)
    if frame.buffers[member.loop.out].kind not in ARGUMENTS or not atoms:
        return
    for atom in atoms:
        emitter.checked(atom)
    emitter.line("if (__builtin_expect(*status != 0, 0)) return;")
