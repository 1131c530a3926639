"""Contractions through tensor maps, which load and store blocks without addresses in registers.

Persistent: a program for each multiprocessor loops over tiles, and that loop and the one over the
depth are one, so that loads of the next tile are on their way while this one is stored. Mapped: one
tile per program. A tile is stored in parts, which share the memory that a whole needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from perfuse.codegen.triton.frame import KernelText
from perfuse.codegen.triton.spelling import COMPUTE_TYPE, NARROW_TYPE
from perfuse.codegen.triton.templates.frame import ACCUMULATOR, ContractionFrame
from perfuse.codegen.triton.templates.maps import (
    can_launcher_make,
    is_row_major,
    map_type,
    matrix_map,
    operand_map,
)
from perfuse.codegen.triton.templates.pointers import Phase, join, phases
from perfuse.codegen.triton.tiling import num_blocks
from perfuse.codegen.writer import Writer
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer, View
from perfuse.schedule.contract import place_of, result_load
from perfuse.schedule.plan import Kernel

ALIGNMENT = 16  # bytes to which a tensor map aligns its start and its rows


def persistent_text(frame: ContractionFrame) -> KernelText:
    """All tiles of a matmul, distributed over the programs round-robin."""
    w, template = frame.w, frame.template
    _map_all(frame, w)
    tiles = frame.dim(frame.tiles)
    around = f"tl.program_id(0), {tiles}, {template.programs}, flatten=True"
    with w.indented(f"for tile in tl.range({around}):"):
        frame.place_tile(w, "tile")
        _tile(frame, w)
    return _text(frame, (template.programs, 1, 1))


def mapped_text(frame: ContractionFrame) -> KernelText:
    """One tile per program, of a matrix or of a batch, or a share of its depth."""
    w, splits = frame.w, frame.template.splits
    w.line("tile = tl.program_id(0)")
    if splits > 1:
        w.line("split = tl.program_id(1)")
    frame.place_tile(w, "tile")
    _map_all(frame, w)
    _tile(frame, w)
    return _text(frame, (frame.tiles, splits, 1))


def _text(frame: ContractionFrame, grid: tuple[Dim, Dim, Dim]) -> KernelText:
    text, maps = frame.text(grid), frame.passed_maps
    passed = ((name, map_type(made, is_gluon=False)) for name, made in maps.items())
    return replace(text, parameters=(*text.parameters, *passed), maps=tuple(maps.values()))


def _map_all(frame: ContractionFrame, w: Writer) -> None:
    rows, columns, depth = (frame.template.rows, frame.template.columns, frame.template.depth)
    for number, phase in enumerate(phases(frame.matmuls)):
        _map_operand(frame, w, f"a_map{number}", frame.matmuls[phase[0]].operands.a, (rows, depth))
        for k in phase:
            _map_operand(frame, w, f"b_map{k}", frame.matmuls[k].operands.b, (depth, columns))
    _map_results(frame, w)


def _tile(frame: ContractionFrame, w: Writer) -> None:
    for number, phase in enumerate(phases(frame.matmuls)):
        _multiply(frame, w, number, phase)
    count = range(len(frame.matmuls))
    if frame.template.splits > 1:
        join(frame, w, [f"acc{k}" for k in count])
        return
    if frame.template.parts == 1:
        frame.finish(w, [f"acc{k}" for k in count])
        return
    for k in count:
        w.line(f"halves = tl.permute(tl.reshape(acc{k}, (R, 2, C)), (0, 2, 1))")
        w.line(f"acc{k}_0, acc{k}_1 = tl.split(halves)")
    for part in range(frame.template.parts):
        frame.finish(w, [f"acc{k}_{part}" for k in count], part)


def _map_operand(
    frame: ContractionFrame, w: Writer, name: str, view: View, block: tuple[int, int]
) -> None:
    """A tensor map over an operand, in the order of its memory."""
    if can_launcher_make(frame, view, block):
        frame.passed_maps[name] = operand_map(frame, view, block)
        return
    shape = [frame.dim(d) for d in view.shape[-2:]]
    strides = [frame.dim(d) for d in view.strides[-2:]]
    if not is_row_major(view):
        shape, strides, block = shape[::-1], strides[::-1], block[::-1]
    made = f"[{', '.join(shape)}], [{strides[0]}, 1], [{block[0]}, {block[1]}]"
    w.line(f"{name} = tl.make_tensor_descriptor({frame.base(view)}, {made})")


def _map_results(frame: ContractionFrame, w: Writer) -> None:
    """Tensor maps over the results with the layout of the matrix; others are stored by address."""
    for name, index in stored_places(frame.kernel, frame.buffers).items():
        buffer = frame.buffers[name]
        if is_mapped(buffer, index, frame.kernel):
            own = frame.maps[name] = f"map{len(frame.maps)}"
            view = View(name, (frame.height, frame.width), (frame.width, 1), 0)
            if can_launcher_make(frame, view, (frame.tile.rows, frame.tile.columns)):
                frame.passed_maps[own] = matrix_map(frame, name)
                continue
            pointer = frame.names.argument(name)
            size = f"[{frame.dim(frame.height)}, {frame.dim(frame.width)}]"
            strides = f"[{frame.dim(frame.width)}, 1]"
            w.line(f"{own} = tl.make_tensor_descriptor({pointer}, {size}, {strides}, [R, C])")


def _multiply(frame: ContractionFrame, w: Writer, number: int, phase: Phase) -> None:
    """The loop over the depth of matmuls that share their first operand."""
    template, first = frame.template, frame.matmuls[phase[0]]
    for k in phase:
        kind = ACCUMULATOR[frame.matmuls[k].accumulate]
        shape = f"[{template.columns}, R]" if template.is_swapped else f"[R, {template.columns}]"
        w.line(f"acc{k} = tl.zeros({shape}, {kind})")
    with w.indented(f"for step in range({_steps(frame, frame.depth(first))}):"):
        at = frame.coordinate(f"step * {template.depth}")
        rows, columns = (
            frame.coordinate(text) for text in ("tile_row * R", f"tile_column * {template.columns}")
        )
        a, swapped = first.operands.a, template.is_swapped
        a_block = _load(f"a_map{number}", a, rows, at, is_transposed=swapped)
        w.line(f"a = {a_block}{frame.widened(first, a)}")
        for k in phase:
            b = frame.matmuls[k].operands.b
            b_block = _load(f"b_map{k}", b, at, columns, is_transposed=swapped)
            w.line(f"b = {b_block}{frame.widened(frame.matmuls[k], b)}")
            left, right = ("b", "a") if swapped else ("a", "b")
            w.line(f"acc{k} = {frame.dot(left, right, f'acc{k}')}")
    for k in phase if template.is_swapped else ():
        w.line(f"acc{k} = tl.trans(acc{k})")


def _steps(frame: ContractionFrame, depth: Dim) -> str:
    """The steps of a program along the depth: all, or its share."""
    template = frame.template
    steps = num_blocks(depth, template.depth)
    if template.splits == 1:
        return frame.dim(steps)
    share = frame.dim(num_blocks(steps, template.splits))
    return f"split * ({share}), tl.minimum((split + 1) * ({share}), {frame.dim(steps)})"


def _load(name: str, view: View, row: str, column: str, *, is_transposed: bool) -> str:
    at = f"{row}, {column}" if is_row_major(view) else f"{column}, {row}"
    turn = ".T" if is_row_major(view) == is_transposed else ""
    return f"{name}.load([{at}]){turn}"


# -- what a tensor map can describe --------------------------------------------------------


def is_mappable(view: View, dtype: DType) -> bool:
    """Whether a matrix has a unit stride and aligned rows, all known now."""
    if 1 not in view.strides[-2:]:
        return False
    outer = view.strides[-2] if is_row_major(view) else view.strides[-1]
    apart = (outer, view.offset, *view.strides[:-2])
    are_aligned = (isinstance(d, int) and d * dtype.num_bytes % ALIGNMENT == 0 for d in apart)
    return outer != 0 and all(are_aligned)


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
