"""Contractions by tensor maps: a program for each multiprocessor loops over tiles.

The loops over tiles and over their depth are one, so that the loads of the next tile are on their
way while this one is stored. A tile is stored in parts, which share the memory that a whole needs.
"""

from __future__ import annotations

from collections.abc import Mapping

from perfuse.codegen.triton.frame import KernelText
from perfuse.codegen.triton.spelling import COMPUTE_TYPE, NARROW_TYPE
from perfuse.codegen.triton.templates.frame import ACCUMULATOR, ContractionFrame
from perfuse.codegen.triton.tiling import num_blocks
from perfuse.codegen.writer import Writer
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer, Matmul, View
from perfuse.schedule.contract import place_of, result_load
from perfuse.schedule.plan import Kernel

ALIGNMENT = 16  # bytes to which a tensor map aligns its start and its rows


def persistent_text(frame: ContractionFrame) -> KernelText:
    """All tiles of a matmul, dealt to the programs in turn."""
    w, template = frame.w, frame.template
    (matmul,) = frame.matmuls
    _map_operand(frame, w, "a_map", matmul.operands.a, (template.rows, template.depth))
    _map_operand(frame, w, "b_map", matmul.operands.b, (template.depth, template.columns))
    _map_results(frame, w)
    tiles = frame.dim(frame.tiles)
    around = f"tl.program_id(0), {tiles}, {template.programs}, flatten=True"
    with w.indented(f"for tile in tl.range({around}):"):
        frame.place_tile(w, "tile")
        _multiply(frame, w, matmul)
        for part, name in enumerate(_parts(frame, w)):
            frame.finish(w, [name], part)
    return frame.text((template.programs, 1, 1))


def _map_operand(
    frame: ContractionFrame, w: Writer, name: str, view: View, block: tuple[int, int]
) -> None:
    """A tensor map over an operand, in the order of its memory."""
    shape, strides = [frame.dim(d) for d in view.shape], [frame.dim(d) for d in view.strides]
    if not is_row_major(view):
        shape, strides, block = shape[::-1], strides[::-1], block[::-1]
    made = f"[{', '.join(shape)}], [{strides[0]}, 1], [{block[0]}, {block[1]}]"
    w.line(f"{name} = tl.make_tensor_descriptor({frame.base(view)}, {made})")


def _map_results(frame: ContractionFrame, w: Writer) -> None:
    """Tensor maps over the results that lie as the matrix does; others are stored by address."""
    for name, index in stored_places(frame.kernel, frame.buffers).items():
        buffer = frame.buffers[name]
        if frame.template.parts > 1 and is_mapped(buffer, index, frame.kernel):
            pointer, own = frame.names.argument(name), f"map{len(frame.maps)}"
            size = f"[{frame.dim(frame.height)}, {frame.dim(frame.width)}]"
            strides = f"[{frame.dim(frame.width)}, 1]"
            w.line(f"{own} = tl.make_tensor_descriptor({pointer}, {size}, {strides}, [R, C])")
            frame.maps[name] = own


def _multiply(frame: ContractionFrame, w: Writer, matmul: Matmul) -> None:
    template, (a, b) = frame.template, (matmul.operands.a, matmul.operands.b)
    shape = f"[R, {template.columns}]"
    w.line(f"acc = tl.zeros({shape}, {ACCUMULATOR[matmul.accumulate]})")
    steps = num_blocks(frame.depth(matmul), template.depth)
    with w.indented(f"for step in range({frame.dim(steps)}):"):
        rows, columns = "tile_row * R", f"tile_column * {template.columns}"
        w.line(f"a = {_load('a_map', a, rows, f'step * {template.depth}')}")
        w.line(f"b = {_load('b_map', b, f'step * {template.depth}', columns)}")
        w.line(f"acc = {frame.dot('a', 'b', 'acc')}")


def _load(name: str, view: View, row: str, column: str) -> str:
    if is_row_major(view):
        return f"{name}.load([{row}, {column}])"
    return f"{name}.load([{column}, {row}]).T"


def _parts(frame: ContractionFrame, w: Writer) -> list[str]:
    if frame.template.parts == 1:
        return ["acc"]
    w.line("halves = tl.permute(tl.reshape(acc, (R, 2, C)), (0, 2, 1))")
    w.line("acc_0, acc_1 = tl.split(halves)")
    return ["acc_0", "acc_1"]


# -- what a tensor map can describe --------------------------------------------------------


def is_row_major(view: View) -> bool:
    return view.strides[-1] == 1


def is_mappable(view: View, dtype: DType) -> bool:
    """Whether a matrix has a unit stride and aligned rows, all known now."""
    if len(view.shape) != 2 or 1 not in view.strides or not isinstance(view.offset, int):
        return False
    outer = view.strides[0] if is_row_major(view) else view.strides[1]
    item = dtype.num_bytes
    return (
        isinstance(outer, int)
        and outer > 0
        and outer * item % ALIGNMENT == 0
        and view.offset * item % ALIGNMENT == 0
    )


def stored_places(kernel: Kernel, buffers: Mapping[str, Buffer]) -> dict[str, Dim]:
    """The results of a kernel that reach memory, and the index of an element of each."""
    assert kernel.contraction is not None
    found = {m.loop.out: m.loop.index for m in kernel.members if m.loop.out in kernel.stored}
    for matmul in kernel.contraction.matmuls:
        if matmul.out in kernel.stored:
            found[matmul.out] = result_load(matmul, kernel, buffers).index
    return found


def is_mapped(buffer: Buffer, index: Dim, kernel: Kernel) -> bool:
    """Whether a result is stored row by row without gaps, in rows that are aligned."""
    *outer, row, column = place_of(kernel)
    width = ix.product([axis.size for axis in kernel.axes if axis.reduced])
    is_dense = not outer and index is ix.add(ix.mul(row, width), column)
    is_plain = buffer.dtype in NARROW_TYPE or buffer.dtype in COMPUTE_TYPE
    aligned = isinstance(width, int) and width * buffer.dtype.num_bytes % ALIGNMENT == 0
    return is_dense and is_plain and aligned and buffer.dtype.num_bytes in (2, 4)
