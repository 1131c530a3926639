"""Templates of C++ matmuls: their parameters, which of them are legal, which are worth a race."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from perfuse.decision import Choice
from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer, Matmul, View
from perfuse.schedule.contract import depth_of, sizes_of
from perfuse.schedule.plan import Kernel
from perfuse.target import Target

SOURCE = "cpp"

# Types that are widened to float32 while they are read; there are no templates for wider ones.
_OPERANDS = frozenset({DType.F32, DType.BF16, DType.F16, DType.I8, DType.U8})
# Rows up to which the right operand is read in place, whatever its size.
FEW_ROWS = 48
# Rows from which both operands are worth packing.
_MANY_ROWS = 12


class CppTemplateKind(StrEnum):
    """How the right operand is read."""

    PACKED = "packed"  # both operands are copied into the order of their use
    DOTS = "dots"  # its columns are contiguous: dot products, in place
    ROWS = "rows"  # its rows are contiguous: read in place, vector by vector
    PAIRS = "pairs"  # dot products of bfloat16, by the instruction that adds two products


# Those that may compute the right operand, a few columns at a time.
COMPUTING = (CppTemplateKind.DOTS, CppTemplateKind.PAIRS)


@dataclass(frozen=True, slots=True)
class CppTemplate:
    """A matmul of `gemm.h` with its parameters."""

    kind: CppTemplateKind
    rows: int  # summed at once in registers
    columns: int  # the same: vectors, or single columns of dot products
    depth: int  # summed before the next part of the operands is read; 0: all of it
    block_rows: int  # finished at once by a thread; 0: all of them
    block_columns: int

    @property
    def blocking(self) -> str:
        """The class of the header that has the parameters of packed operands."""
        shape = (self.rows, self.columns, self.depth, self.block_rows, self.block_columns)
        return f"pf::Blocking<{', '.join(map(str, shape))}>"

    @property
    def function(self) -> str:
        """The function of the header with these parameters."""
        if self.kind is CppTemplateKind.PACKED:
            return f"pf::gemm_packed<{self.blocking}>"
        if self.kind is CppTemplateKind.DOTS:
            return f"pf::gemm_dots<{self.rows}, {self.columns}, {self.block_columns}>"
        if self.kind is CppTemplateKind.PAIRS:
            return f"pf::gemm_pairs<{self.depth}, {self.block_columns}>"
        return f"pf::gemm_rows<{self.rows}, {self.columns}, {self.depth}, {self.block_columns}>"

    def __str__(self) -> str:
        block = f"{self.block_rows or 'all'}x{self.block_columns}"
        deep = f", depth {self.depth}" if self.depth else ""
        return f"{self.kind} {self.rows}x{self.columns}, block {block}{deep}"


def choice_of(template: CppTemplate) -> Choice:
    return Choice(SOURCE, str(template), tuple(asdict(template).items()))


def template_of(choice: Choice) -> CppTemplate:
    """The template of a choice; TypeError or ValueError if its options are of another kind."""
    options: dict[str, Any] = dict(choice.options)
    return CppTemplate(**{**options, "kind": CppTemplateKind(options["kind"])})


def why_not(kernel: Kernel, buffers: Mapping[str, Buffer]) -> str:
    """Why no C++ template computes a contraction; empty if one does."""
    assert kernel.contraction is not None
    if len(kernel.contraction.matmuls) != 1:
        return "it has several matmuls"
    (matmul,) = kernel.contraction.matmuls
    if len(matmul.operands.b.shape) != 2:
        return "it is a batch of matmuls"
    dtypes = {buffers[view.buffer].dtype for view in (matmul.operands.a, matmul.operands.b)}
    if not dtypes <= _OPERANDS or matmul.accumulate is not DType.F32:
        return f"no template sums {', '.join(sorted(d.value for d in dtypes))}"
    return ""


def is_legal(template: CppTemplate, matmul: Matmul, lanes: int) -> bool:
    """The limits of the templates: search and tests both call it."""
    b = matmul.operands.b
    if template.kind in (CppTemplateKind.DOTS, CppTemplateKind.PAIRS):
        is_whole = template.block_columns % template.columns == template.depth % (2 * lanes) == 0
        return is_whole and _is_contiguous(b, 0)
    width = template.columns * lanes
    if template.block_columns % width or template.depth <= 0:
        return False
    if template.kind is CppTemplateKind.ROWS:
        return _is_contiguous(b, 1)
    return template.block_rows % template.rows == 0


def _is_contiguous(view: View, axis: int) -> bool:
    return view.strides[axis] == 1 or view.shape[axis] == 1


def propose(
    kernel: Kernel, buffers: Mapping[str, Buffer], target: Target
) -> tuple[CppTemplate, ...]:
    """The templates worth a race for a contraction, the likely best first."""
    if why_not(kernel, buffers):
        return ()
    assert kernel.contraction is not None
    (matmul,) = kernel.contraction.matmuls
    rows = sizes_of(matmul)[0]
    found: list[CppTemplate] = []
    if not isinstance(rows, int) or rows <= FEW_ROWS:
        if _is_of_pairs(matmul, buffers, target):
            found += _pairs(rows, depth_of(matmul))
        found += _in_place(rows if isinstance(rows, int) else FEW_ROWS, target)
    if not isinstance(rows, int) or rows >= _MANY_ROWS:
        found += packed(target)
    if kernel.contraction.prologue is not None:  # column by column
        found = [each for each in found if each.kind in COMPUTING]
    return tuple(each for each in found if is_legal(each, matmul, target.lanes))


def _pairs(rows: Dim, depth: Dim) -> list[CppTemplate]:
    """Four rows by four columns, whose sums are added up at once.

    The first-level cache should hold a part of all rows. On one core of Zen 5 (48 KiB), parts of
    512 won with 32 rows of 3072 and 4096, deeper ones with fewer rows, or with a single part.
    """
    is_tall = isinstance(rows, int) and rows > 16
    is_deep = isinstance(depth, int) and depth > 1024
    depths = (512, 1024) if is_tall and is_deep else (1024, 512)
    return [CppTemplate(CppTemplateKind.PAIRS, 4, 4, each, 0, 256) for each in depths]


def _is_of_pairs(matmul: Matmul, buffers: Mapping[str, Buffer], target: Target) -> bool:
    """Whether both operands are bfloat16, and the machine multiplies pairs of them."""
    views = (matmul.operands.a, matmul.operands.b)
    return target.has_bf16_pairs and all(buffers[v.buffer].dtype is DType.BF16 for v in views)


def packed(target: Target) -> list[CppTemplate]:
    """Both operands packed: the tile of registers that the machine holds, blocks by its caches.

    On one core of Zen 3 (L2 512 KiB), 512 to 2048: within 5 % of each other, medians 1.03x to 1.09x
    of MKL's.
    """
    if target.isa == "avx512":
        # 28 of 32 registers are sums; two vectors of the right operand, one of the left.
        return [
            CppTemplate(CppTemplateKind.PACKED, 14, 2, 256, 168, 512),
            CppTemplate(CppTemplateKind.PACKED, 14, 2, 384, 112, 256),
        ]
    if target.isa == "avx2":
        return [
            CppTemplate(CppTemplateKind.PACKED, 6, 2, 256, 96, 512),
            CppTemplate(CppTemplateKind.PACKED, 6, 2, 384, 96, 512),
            CppTemplate(CppTemplateKind.PACKED, 6, 2, 256, 192, 256),
        ]
    return [CppTemplate(CppTemplateKind.PACKED, 4, 1, 256, 96, 256)]


def _in_place(rows: int, target: Target) -> list[CppTemplate]:
    """The right operand read where it is: a group of rows shares each vector of it."""
    wide = target.isa == "avx512"
    found = [CppTemplate(CppTemplateKind.DOTS, 6 if wide else 3, 4, 0, 0, 256)]
    if not wide and rows > 3:
        found.append(CppTemplate(CppTemplateKind.DOTS, 4, 3, 0, 0, 240))
    found.append(CppTemplate(CppTemplateKind.ROWS, 12 if wide else 6, 2, 128, 0, 512))
    found.append(CppTemplate(CppTemplateKind.ROWS, 12 if wide else 6, 2, 256, 0, 256))
    return found
