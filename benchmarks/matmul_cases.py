"""The matmuls that `benchmarks.gpu_matmuls` measures: sizes, layouts, dtypes and epilogues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """A function of tensors, and the library's own way to compute all of it if there is one."""

    name: str
    fn: Callable[..., Any]
    specs: tuple[tuple[tuple[int, ...], tuple[int, ...] | None, torch.dtype], ...]
    library: Callable[..., Any] | None = None

    def inputs(self, device: str) -> tuple[Tensor, ...]:
        return tuple(_tensor(shape, strides, dtype, device) for shape, strides, dtype in self.specs)


def _tensor(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype, device: str
) -> Tensor:
    if strides is None:
        return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.randn(span, device=device, dtype=dtype).as_strided(shape, strides)


def _matmul(rows: int, columns: int, depth: int, layout: str, dtype: torch.dtype = BF16) -> Case:
    """Layouts NN, NT, TN: which of the operands is stored transposed."""
    a = (1, rows) if layout[0] == "T" else (depth, 1)
    b = (1, depth) if layout[1] == "T" else (columns, 1)
    kind = "" if dtype is BF16 else f" {str(dtype).removeprefix('torch.')}"
    specs = (((rows, depth), a, dtype), ((depth, columns), b, dtype))
    return Case(f"mm {rows}x{columns}x{depth} {layout}{kind}", torch.mm, specs)


def _linear(
    name: str, fn: Callable[..., Any], rows: int, columns: int, depth: int,
    library: Callable[..., Any] | None = None, *, residual: bool = False,
) -> Case:  # fmt: skip
    """A linear layer with something after it: x, weight, bias (or the residual)."""
    last = (rows, columns) if residual else (columns,)
    specs = (((rows, depth), None, BF16), ((columns, depth), None, BF16), (last, None, BF16))
    return Case(f"{name} {rows}x{columns}x{depth}", fn, specs, library)


def _fused_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch._addmm_activation(b, x, w.t())


def _fused_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch._addmm_activation(b, x, w.t(), use_gelu=True)


def _epilogues(rows: int, columns: int, depth: int) -> Iterator[Case]:
    sizes = (rows, columns, depth)
    yield _linear("bias relu", lambda x, w, b: F.relu(F.linear(x, w, b)), *sizes, _fused_relu)
    yield _linear("bias gelu", lambda x, w, b: F.gelu(F.linear(x, w, b)), *sizes)
    yield _linear(
        "bias gelu tanh",
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        *sizes,
        _fused_gelu,
    )
    yield _linear(
        "residual",
        lambda x, w, r: r + F.linear(x, w),
        *sizes,
        lambda x, w, r: torch.addmm(r, x, w.t()),
        residual=True,
    )
    weight = ((columns, depth), None, BF16)
    yield Case(
        f"gate and up {rows}x{columns}x{depth}",
        lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u),
        (((rows, depth), None, BF16), weight, weight),
    )


def _scaled(
    rows: int, columns: int, depth: int, *, of_rows: bool, is_fast: bool,
    name: str = "scaled", after: Callable[[Tensor], Tensor] = lambda y: y,
) -> Case:  # fmt: skip
    """FP8 operands with scales of tensors or of rows, and something after the matmul."""

    def fn(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor) -> Tensor:
        made = torch._scaled_mm(x, w.t(), of_x, of_w, out_dtype=BF16, use_fast_accum=is_fast)
        return after(made)

    kind = f"{'row' if of_rows else 'tensor'} scales{', fast sums' if is_fast else ''}"
    scales = ((rows, 1), (1, columns)) if of_rows else ((), ())
    fp8 = torch.float8_e4m3fn
    specs = (((rows, depth), None, fp8), ((columns, depth), None, fp8))
    given = (*specs, *((shape, None, torch.float32) for shape in scales))
    return Case(f"{name} {rows}x{columns}x{depth} {kind}", fn, given)


def _scaled_cases() -> Iterator[Case]:
    """The linear layers of a Llama block, and of decoding, in FP8."""
    sizes = ((8192, 14336, 4096), (8192, 4096, 14336), (8192, 4096, 4096), (16, 14336, 4096))
    for size in sizes:
        for of_rows in (False, True):
            for is_fast in (False, True):
                yield _scaled(*size, of_rows=of_rows, is_fast=is_fast)
    for is_fast in (False, True):
        yield _scaled(*sizes[0], of_rows=True, is_fast=is_fast, name="scaled silu", after=F.silu)


F32 = torch.float32
CASES: tuple[Case, ...] = (
    *(_matmul(4096, 4096, 4096, layout) for layout in ("NN", "NT", "TN")),
    _matmul(8192, 8192, 8192, "NT"),
    _matmul(2048, 50304, 768, "NT"),
    Case(
        "mm 50257x768x32768, strides (1, 50304)",
        torch.mm,
        (((50257, 32768), (1, 50304), BF16), ((32768, 768), (768, 1), BF16)),
    ),
    *_epilogues(4096, 14336, 4096),
    *_epilogues(2048, 1536, 1024),
    _matmul(4096, 512, 16384, "NT"),
    _matmul(2240, 2048, 256, "NN"),
    _matmul(1024, 1024, 1024, "NN"),
    _matmul(512, 512, 4096, "NN"),
    _matmul(128, 8192, 8192, "NT"),
    _matmul(16, 14336, 4096, "NT"),
    _matmul(1, 4096, 14336, "NN"),
    _matmul(1, 4096, 14336, "NT"),
    _linear("bias gelu", lambda x, w, b: F.gelu(F.linear(x, w, b)), 16, 14336, 4096),
    _matmul(1024, 1024, 1024, "NN", F32),
    Case(
        "a@b + c@d float32 2048x1536x64",
        lambda a, b, c, d: a @ b + c @ d,
        (((2048, 64), None, F32), ((64, 1536), None, F32)) * 2,
    ),
    Case(
        "bmm 32x1024x1024x128",
        torch.bmm,
        (((32, 1024, 128), None, BF16), ((32, 128, 1024), None, BF16)),
    ),
    *_scaled_cases(),
)
