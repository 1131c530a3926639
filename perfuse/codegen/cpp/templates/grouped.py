"""Matmuls of groups of rows as one C++ function: a call of `grouped.h`."""

from __future__ import annotations

from collections.abc import Mapping

from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.cpp.kernel import KernelText, parameters_of
from perfuse.codegen.cpp.templates.choices import packed
from perfuse.codegen.writer import Writer
from perfuse.context import Context
from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.ir.matmul import GROUPED_OUTER
from perfuse.ir.program import Buffer, Extern, View
from perfuse.schedule.plan import Kernel

# Rows up to which a matrix is read in place: by dot products, and row by row. On one core of Zen 5,
# 16 rows of 256 by 1024 take 453 us, packed 688; by rows 294 and 684. 24 take 766 and 659, 446 and
# 743.
_FEW_ROWS = (16, 48)
_DOTS = (6, 4, 256)  # rows and columns of dot products at once, and columns finished at once
_PAIRS = "512, 256"  # of bfloat16: the depth and the columns that are summed before others
# Multiplications that are worth a second thread, for each element of cpu.grain.
_WORK_PER_ELEMENT = 8


def generate_grouped(
    kernel: Kernel, buffers: Mapping[str, Buffer], context: Context, over: Mapping[str, str]
) -> KernelText:
    """Write a kernel that multiplies groups of rows."""
    assert kernel.grouped is not None
    frame = CppFrame(kernel, buffers, context, frozenset(), over)
    w = Writer(1)
    _write(w, frame, kernel.grouped)
    names = frame.names
    passed = (tuple(names.arguments), tuple(names.symbols), names.needs_status)
    return KernelText(parameters_of(frame), w.text(), *passed)


def _write(w: Writer, frame: CppFrame, call: Extern) -> None:
    left, right, ends = call.args
    (out,) = call.outs
    assert out is not None

    def whole(dim: Dim) -> str:
        return f"int64_t({frame.dim(dim)})"

    def place(view: View, strides: tuple[Dim, ...]) -> str:
        offset = "" if view.offset == 0 else f" + {frame.dim(view.offset)}"
        steps = "".join(f", {whole(step)}" for step in strides)
        return f"{{{frame.names.argument(view.buffer)}{offset}{steps}}}"

    kind, form = (frame.names.storage(view.buffer) for view in (left, ends))
    groups = f"{place(ends, ends.shape)[:-1]}, {whole(left.shape[0])}}}"
    w.line(f"const pf::Groups<{form}> groups = {groups};")
    w.line(f"const pf::Matrix<{kind}> left = {place(left, left.strides)};")
    others = "Matrix" if call.op == GROUPED_OUTER else "Matrices"
    w.line(f"const pf::{others}<{kind}> right = {place(right, right.strides)};")
    rows, depth, columns = whole(left.shape[0]), whole(left.shape[1]), whole(right.shape[-1])
    work = frame.settings.cpu.grain_elements * _WORK_PER_ELEMENT
    w.line(f"if ({rows} * {depth} * {columns} < {work}) threads = 1;")
    target, blocking = frame.names.target(out), packed(frame.target)[0].blocking
    if frame.buffers[out].dtype is DType.BF16:
        given = f"left, right, groups, {columns}, {depth}, {target}, threads"
        w.line(f"pf::grouped_pairs<{_PAIRS}>({given});")
    elif call.op == GROUPED_OUTER:
        given = f"left, right, groups, {depth}, {columns}, {target}, threads"
        w.line(f"pf::grouped_outer<{blocking}>({given});")
    else:
        numbers = ", ".join(map(str, (*_FEW_ROWS, *_DOTS)))
        given = f"left, right, groups, {columns}, {depth}, {target}, threads"
        w.line(f"pf::grouped_matmul<{blocking}, {numbers}>({given});")
