"""`CkProblem`: a matmul as Composable Kernel sees it, by sizes, strides, layouts and types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfuse.context import Context
from perfuse.ir.dtype import DType
from perfuse.ir.program import Buffer, Matmul, View

ROW, COL = "Row", "Col"
# The names of CK's types. Which of the two E4M3 is F8 depends on the GPU (`f8_of`).
_NAMES = {DType.F16: "F16", DType.BF16: "BF16", DType.F32: "F32"}
ELEMENT_BYTES = {"F16": 2, "BF16": 2, "F8": 1, "F32": 4, "I4": 0.5}


@dataclass(frozen=True, slots=True)
class CkOperand:
    """A matrix, or a batch of them: `stride` is the distance of its rows, or of its columns."""

    layout: str  # Row: elements of a row are contiguous; Col: those of a column
    dtype: str
    stride: int
    batch_stride: int = 0
    offset: int = 0  # of the first element in its buffer


@dataclass(frozen=True, slots=True)
class CkProblem:
    """c = alpha * (a @ b) + beta * d."""

    m: int
    n: int
    k: int
    a: CkOperand
    b: CkOperand
    c: CkOperand
    d: CkOperand | None = None  # a bias, broadcast along the dimensions of stride 0
    batch: int | None = None  # the number of matrices; None: not a batch
    alpha: float = 1.0
    beta: float = 1.0
    is_scaled: bool = False  # multiplied by two scales of one element each, in memory

    def __str__(self) -> str:
        batch = "" if self.batch is None else f"{self.batch}x"
        layouts = self.a.layout[0] + self.b.layout[0] + self.c.layout[0]
        types = f"{self.a.dtype}x{self.b.dtype}->{self.c.dtype}".lower()
        return f"matmul {batch}{self.m}x{self.n}x{self.k} {layouts} {types}"


def arch_of_name(name: str) -> str:
    """The architecture alone: ROCm's tools report names such as gfx942:sramecc+:xnack-."""
    return name.partition(":")[0]


def ck_arch(context: Context) -> str:
    """The GPU that CK is compiled for: the setting's, else the target's."""
    gpu = context.target.gpu
    return arch_of_name(context.settings.rocm.arch) or ("" if gpu is None else gpu.arch)


def f8_of(arch: str) -> DType:
    """The type that CK's F8 is on a GPU: the matrix units of gfx942 have another E4M3."""
    return DType.F8E4M3FN if arch.startswith("gfx95") else DType.F8E4M3FNUZ


def ck_problem(matmul: Matmul, buffers: Mapping[str, Buffer], arch: str) -> CkProblem | str:
    """A matmul of a plan as a CK problem, or why it is not one."""
    operands, out = matmul.operands, buffers[matmul.out]
    views = [operands.a, operands.b, View(matmul.out, out.shape, out.strides)]
    has_bias = operands.bias is not None and matmul.beta != 0
    if operands.bias is not None and has_bias:
        views.append(operands.bias)
    known = [*views, *operands.scales]
    dims: list[Any] = [d for v in known for d in (*v.shape, *v.strides, v.offset)]
    if not all(isinstance(dim, int) for dim in dims):
        return "its sizes are not static"
    made = [_operand(view, buffers[view.buffer], arch) for view in views[:3]]
    bad = next((each for each in made if isinstance(each, str)), None)
    if bad is not None:
        return bad
    a, b, c = (each for each in made if isinstance(each, CkOperand))
    sizes: Any = (*operands.a.shape[:-1], operands.b.shape[-1], operands.a.shape[-1])
    *batch, m, n, k = sizes
    if min(sizes) == 0:
        return "it has no elements"
    d = _bias(operands.bias, out, buffers, arch) if operands.bias and has_bias else None
    if isinstance(d, str):
        return d
    if any(size != 1 for view in operands.scales for size in view.shape):
        return "its scales are not those of whole tensors"
    factors = (float(matmul.alpha), float(matmul.beta))
    batched, is_scaled = batch[0] if batch else None, bool(operands.scales)
    return CkProblem(m, n, k, a, b, c, d, batched, *factors, is_scaled)


def _dtype(buffer: Buffer, arch: str) -> str | None:
    return "F8" if buffer.dtype is f8_of(arch) else _NAMES.get(buffer.dtype)


def _operand(view: View, buffer: Buffer, arch: str) -> CkOperand | str:
    """An operand with its layout; a reason where neither rows nor columns are contiguous."""
    shape: Any = view.shape
    strides: Any = view.strides
    offset: Any = view.offset
    dtype = _dtype(buffer, arch)
    if dtype is None:
        return f"CK has no instances for {buffer.dtype}"
    if len(shape) not in (2, 3):
        return "its operands are not matrices"
    batch_stride = strides[0] if len(shape) == 3 else 0
    if strides[-1] == 1 and (strides[-2] >= shape[-1] or shape[-2] == 1):
        return CkOperand(ROW, dtype, max(strides[-2], shape[-1]), batch_stride, offset)
    if strides[-2] == 1 and (strides[-1] >= shape[-2] or shape[-1] == 1):
        return CkOperand(COL, dtype, max(strides[-1], shape[-2]), batch_stride, offset)
    return "neither rows nor columns of an operand are contiguous"


def _bias(view: View, out: Buffer, buffers: Mapping[str, Buffer], arch: str) -> CkOperand | str:
    """The bias as a D tensor; along a dimension that it is broadcast over, its stride is 0."""
    dtype = _dtype(buffers[view.buffer], arch)
    if dtype is None:
        return f"CK has no instances with a bias of {buffers[view.buffer].dtype}"
    shape: Any = (1,) * (len(out.shape) - len(view.shape)) + view.shape
    given: Any = (0,) * (len(out.shape) - len(view.shape)) + view.strides
    offset: Any = view.offset
    strides = [0 if size == 1 else stride for size, stride in zip(shape, given, strict=True)]
    if strides[-1] != 1 and out.shape[-1] != 1:
        return "the columns of its bias are not contiguous"
    return CkOperand(ROW, dtype, strides[-2], strides[0] if len(strides) == 3 else 0, offset)
