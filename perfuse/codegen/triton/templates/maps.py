"""Tensor maps of contractions: matrices that are copied in blocks, without addresses in registers.

The launcher creates them if everything but the address is known; others are created in the kernel.
"""

from __future__ import annotations

from typing import TypeVar

from perfuse.codegen.triton.sources import SWIZZLED_BYTES, TensorMap
from perfuse.codegen.triton.spelling import POINTER_TYPE
from perfuse.codegen.triton.templates.frame import ContractionFrame
from perfuse.ir.index import Dim
from perfuse.ir.program import View

T = TypeVar("T")


def is_row_major(view: View) -> bool:
    return view.strides[-1] == 1


def in_memory(view: View, block: tuple[T, T]) -> tuple[T, T]:
    """The sizes of a block in the order of an operand's memory."""
    return block if is_row_major(view) else (block[1], block[0])


def operand_map(frame: ContractionFrame, view: View, block: tuple[int, int]) -> TensorMap:
    """A tensor map over an operand, in the order of its memory."""
    rows, columns = in_memory(view, (0, 1))
    shape, strides = view.shape[-2:], view.strides[-2:]
    dtype = frame.buffers[view.buffer].dtype
    sizes = (_known(shape[rows]), _known(shape[columns]))
    stride, offset = _known(strides[rows]), _known(view.offset)
    return TensorMap(view.buffer, offset, dtype, sizes, stride, in_memory(view, block))


def matrix_map(frame: ContractionFrame, buffer: str) -> TensorMap:
    """A tensor map over a buffer that is stored as the result is."""
    height, width, tile = _known(frame.height), _known(frame.width), frame.tile
    block, dtype = (tile.rows, tile.columns), frame.buffers[buffer].dtype
    return TensorMap(buffer, 0, dtype, (height, width), width, block)


def _known(dim: Dim) -> int:
    assert isinstance(dim, int), f"a tensor map of unknown size: {dim}"
    return dim


def map_type(made: TensorMap, *, is_gluon: bool) -> str:
    """The type of a parameter that takes a tensor map; Gluon's says how blocks are stored."""
    kind = POINTER_TYPE[made.dtype].removeprefix("*")
    bits = 8 * made.dtype.num_bytes
    layout = f"NVMMASharedLayout(swizzle_byte_width={SWIZZLED_BYTES}, element_bitwidth={bits})"
    return f"tensordesc<{kind}[{made.block[0]}, {made.block[1]}]{f',{layout}' if is_gluon else ''}>"


def can_launcher_make(frame: ContractionFrame, view: View, block: tuple[int, int]) -> bool:
    """Whether everything about a map over a matrix is known except its address."""
    dims = (*view.shape, *view.strides, view.offset)
    width = in_memory(view, block)[1] * frame.buffers[view.buffer].dtype.num_bytes
    is_one = not frame.batch and all(isinstance(dim, int) for dim in dims)
    return is_one and frame.names.dialect.maps_on_host and width >= SWIZZLED_BYTES
