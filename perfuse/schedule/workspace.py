"""Workspace: bytes that a step allocates while it runs, besides the buffers of the plan.

A library copies operands whose layout it cannot read, and keeps partial sums in a
wider type. A row for each op that is known to, by what was measured of it on a CPU (the tests
measure again) and by what its kernels allocate on a GPU. Workspace that a library takes once and
keeps, as cuBLAS does, does not count for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from perfuse.ir.index import Dim
from perfuse.ir.matmul import Operands, matmul_op
from perfuse.ir.program import Buffer, LibraryCall
from perfuse.schedule.plan import Kernel, Role
from perfuse.schedule.size_hints import Hints, value_of

FLOAT_BYTES = 4
INDEX_BYTES = 8

# From this many channels on, a CPU convolves in blocks of them, which plain tensors are copied to.
_CHANNELS_OF_BLOCKS = 16
_WEIGHTS_PER_THREAD = 4.5
# How the CPU's attention splits its rows: rows per thread, and the number to start from.
_ATTENTION_ROWS = ((768, 256), (192, 64), (0, 32))
_ATTENTION_COLUMNS = 512
# Blocks a processor of a GPU has in flight where columns are summed, a part of the sum each.
_BLOCKS_PER_PROCESSOR = 4


@dataclass(frozen=True, slots=True)
class SizedOperand:
    """A tensor argument: its sizes as numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.item_bytes

    @property
    def is_half(self) -> bool:
        return self.item_bytes == 2


@dataclass(frozen=True, slots=True)
class Call:
    """The input of a row: the tensors in order, and all arguments."""

    operands: tuple[SizedOperand, ...]
    results: tuple[SizedOperand, ...]
    args: tuple[object, ...]
    num_parallel: int  # threads of a CPU, processors of a GPU


def workspace_of_call(
    step: LibraryCall, buffers: Mapping[str, Buffer], hints: Hints, device: str, num_parallel: int
) -> int:
    """Bytes that an ATen call needs besides its arguments and results; 0 if unknown."""
    name = step.op.removeprefix("aten.").partition(".")[0]
    row = _EVERYWHERE.get(name) or (_ON_CPU if device == "cpu" else _ON_GPU).get(name)
    matmul = matmul_op(step.op)
    if row is None and matmul is None:
        return 0
    views = [_operand(v.buffer, v.shape, v.strides, buffers, hints) for v in step.views()]
    if matmul is not None:
        is_known = len(views) == len(step.args)  # complex tensors are opaque
        return _matmul(matmul.operands(views)) if is_known else 0
    assert row is not None
    made = [buffers[o] for o in step.outs if o is not None and o in buffers]
    results = [_operand(b.name, b.shape, b.strides, buffers, hints) for b in made]
    return row(Call(tuple(views), tuple(results), step.args, num_parallel))


def workspace_of_kernel(
    kernel: Kernel, buffers: Mapping[str, Buffer], hints: Hints, num_parallel: int
) -> int:
    """Scratch of a GPU kernel that sums columns: each block in flight has a part of every sum."""
    sums = [m.loop.out for m in kernel.members if m.role == Role.OUTER]
    elements = sum(value_of(buffers[name].num_elements, hints) for name in sums if name in buffers)
    rows = prod(value_of(axis.size, hints) for axis in kernel.axes if not axis.reduced)
    blocks = min(num_parallel * _BLOCKS_PER_PROCESSOR, max(rows // 8, 1))
    return elements * FLOAT_BYTES * blocks if blocks > 1 else 0


def _operand(
    name: str, shape: Sequence[Dim], strides: Sequence[Dim], buffers: Mapping[str, Buffer],
    hints: Hints,
) -> SizedOperand:  # fmt: skip
    sizes, steps = ([value_of(d, hints) for d in dims] for dims in (shape, strides))
    return SizedOperand(tuple(sizes), tuple(steps), buffers[name].dtype.num_bytes)


Estimator = Callable[[Call], int]


def _matmul(operands: Operands[SizedOperand]) -> int:
    """A matrix is read along its rows or its columns; one that has neither is copied."""
    matrices = [o for o in (operands.a, operands.b) if len(o.shape) > 1 and o.num_elements > 1]
    return sum(o.num_bytes for o in matrices if 1 not in o.strides[-2:])


def _is_plain(image: SizedOperand) -> bool:
    """An image whose channels are not innermost."""
    return image.strides[1] != 1 and prod(image.shape[2:]) > 1


def _in_blocks(image: SizedOperand) -> int:
    """The bytes of a copy in blocks of channels; few channels are read in place."""
    is_copied = _is_plain(image) and image.shape[1] >= _CHANNELS_OF_BLOCKS
    return image.num_bytes if is_copied else 0


def _convolution(call: Call) -> int:
    image, weight = call.operands[:2]
    result = sum(r.num_bytes for r in call.results)
    if call.args[6] is True:  # transposed
        return 2 * result
    if not _is_plain(image):
        return weight.num_bytes
    return max(_in_blocks(image) + weight.num_bytes, result)


def _convolution_backward(call: Call) -> int:
    gradient, image, weight = call.operands[:3]
    if not _is_plain(image):
        return 2 * weight.num_bytes
    wanted = call.args[10]
    if isinstance(wanted, tuple | list) and wanted[0]:
        has_steps = prod(gradient.shape[2:]) * 2 <= prod(image.shape[2:])
        return image.num_bytes + (image if has_steps else gradient).num_bytes
    # Each thread sums the weight's gradient by itself, in blocks and in plain order.
    sums = _WEIGHTS_PER_THREAD * weight.num_bytes * call.num_parallel
    return max(gradient.num_bytes + _in_blocks(image), int(sums))


def _gpu_convolution(call: Call) -> int:
    """Halves are convolved with their channels innermost; other layouts are copied."""
    image, weight = call.operands[:2]
    if not (image.is_half and _is_plain(image)):
        return 0
    return image.num_bytes + weight.num_bytes + sum(r.num_bytes for r in call.results)


def _split(length: int) -> int:
    return next(rows for least, rows in _ATTENTION_ROWS if length >= least)


def _cpu_attention(call: Call) -> int:
    query, key = call.operands[:2]
    rows, columns = _split(query.shape[2]), min(key.shape[2], _ATTENTION_COLUMNS)
    scores = rows * columns
    each = FLOAT_BYTES * (scores + 2 * rows + rows * query.shape[3])
    return call.num_parallel * (each + (2 * scores if query.is_half else 0))


def _cpu_attention_backward(call: Call) -> int:
    gradient, query, key = call.operands[:3]
    scores = _split(query.shape[2]) * min(key.shape[2], _ATTENTION_COLUMNS)
    _, heads, length, width = gradient.shape
    wanted = (length * heads * width, width, heads * width, 1)  # as the kernel walks it
    copied = 0 if gradient.strides == wanted else gradient.num_bytes
    return copied + call.num_parallel * scores * 2 * (FLOAT_BYTES + 2 * query.is_half)


def _up_to(number: int, step: int) -> int:
    return -(-number // step) * step


def _gpu_flash_backward(call: Call) -> int:
    """The query's gradient is summed in float32, plus a number for each row."""
    query, key, value = call.operands[1:4]
    batch, heads, length, width = query.shape
    rows = batch * heads * _up_to(length, 128)
    summed = FLOAT_BYTES * rows * (_up_to(width, 32) + 1)
    if key.shape[1] == heads:
        return summed
    # Heads that share keys have gradients of their own for them at first.
    return summed + (key.num_bytes + value.num_bytes) * heads // key.shape[1]


def _gpu_efficient_backward(call: Call) -> int:
    query = call.operands[1]
    batch, heads, length, width = query.shape
    rows = batch * heads * _up_to(length, 32)
    return FLOAT_BYTES * rows * (1 + (width if query.is_half else 0))


def _gpu_embedding_backward(call: Call) -> int:
    """Indices are sorted, with their places, and gradients summed in short runs first."""
    gradient, indices = call.operands[:2]
    count, width = indices.num_elements, gradient.shape[-1]
    runs = min(count, sum(r.shape[0] for r in call.results)) + count // 10
    return 4 * INDEX_BYTES * count + FLOAT_BYTES * runs * width


def _gpu_sort(call: Call) -> int:
    return 2 * _copy_with_indices(call)


def _gpu_index_put(call: Call) -> int:
    """Summed where an index comes twice: indices are sorted, with their places."""
    is_summed = len(call.args) > 3 and call.args[3] is True
    indices = [o for o in call.operands[1:] if o.item_bytes == INDEX_BYTES]
    return 5 * INDEX_BYTES * max((o.num_elements for o in indices), default=0) * is_summed


def _copy_with_indices(call: Call) -> int:
    values = call.operands[0]
    return values.num_bytes + INDEX_BYTES * values.num_elements


def _one_copy(call: Call) -> int:
    return call.operands[0].num_bytes


_EVERYWHERE: dict[str, Estimator] = {"linalg_inv_ex": _one_copy}
_ON_CPU: dict[str, Estimator] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
    "kthvalue": _copy_with_indices,
}
_ON_GPU: dict[str, Estimator] = {
    "convolution": _gpu_convolution,
    "convolution_backward": _gpu_convolution,
    "_scaled_dot_product_flash_attention_backward": _gpu_flash_backward,
    "_scaled_dot_product_cudnn_attention_backward": _gpu_flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _gpu_efficient_backward,
    "embedding_dense_backward": _gpu_embedding_backward,
    "sort": _gpu_sort,
    "index_put": _gpu_index_put,
}
