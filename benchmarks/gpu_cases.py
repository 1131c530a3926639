"""The GPU's cases: the sizes of the baselines, and what must hold for each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import kernels as k
from benchmarks.cases import Case, Function, Problem, backward_problem, forward_problem
from benchmarks.gpu_models import model_cases

E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0
DROPOUT = 0.1


@dataclass(frozen=True, slots=True)
class Array:
    """An argument to be made: normal numbers, or integers below `high`."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    high: int = 0

    def make(self, shrink: int) -> Tensor:
        shape = [max(d // shrink, 8) if d >= 256 else d for d in self.shape]
        if self.high:
            return torch.randint(0, max(self.high // shrink, 8), shape).to(self.dtype)
        return torch.randn(shape).to(self.dtype)


def bf16(*shape: int) -> Array:
    return Array(shape)


def half(*shape: int) -> Array:
    return Array(shape, torch.float16)


def f32(*shape: int) -> Array:
    return Array(shape, torch.float32)


def ints(*shape: int, high: int) -> Array:
    return Array(shape, torch.int64, high)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    function: Function
    args: tuple[Array, ...]
    fb: bool = False  # with the backward pass
    mutates: bool = False
    over_peer: float = 0.97  # at least this speed relative to the peer
    of_copy: float = 0.75  # and this share of the copy's bandwidth, where bound by memory
    is_memory_bound: bool = True
    bytes_moved: int | None = None
    check: Callable[[Any, tuple[Any, ...]], list[str]] | None = None

    def case(self, shrink: int) -> Case:
        what = " ".join("x".join(map(str, a.shape)) for a in self.args[:2])
        build = partial(problem, self, shrink)
        moved = self.bytes_moved // shrink if self.bytes_moved else None
        return Case(self.name, "kernel", what, build, self.is_memory_bound, moved, self.check)


def problem(row: Row, shrink: int) -> Problem:
    torch.manual_seed(0)
    args = [a.make(shrink) for a in row.args]
    if row.fb:
        return backward_problem(row.function, args)
    return forward_problem(row.function, args, mutates=row.mutates)


def at_least_f32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def ln_fp8(x: Tensor, scale: Tensor, buffer: Tensor) -> Tensor:
    y = F.layer_norm(at_least_f32(x), x.shape[-1:])
    buffer.fill_(y.abs().amax())
    return to_e4m3(y * scale)


def amax_quant(x: Tensor, scale: Tensor, buffer: Tensor) -> Tensor:
    buffer.fill_(x.abs().amax())
    return to_e4m3(at_least_f32(x) * scale)


def dyn_quant_row(x: Tensor) -> tuple[Tensor, Tensor]:
    amax = at_least_f32(x.abs().amax(-1, keepdim=True)).clamp(min=1e-12)
    scale = E4M3_MAX / amax
    return to_e4m3(at_least_f32(x) * scale), 1 / scale


def dequant(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).to(torch.bfloat16)


def ce(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(at_least_f32(x), target)


def rmsnorm_t5(x: Tensor, weight: Tensor) -> Tensor:
    wide = at_least_f32(x)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def transpose_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y.t()


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def adam(grad: Tensor, m: Tensor, v: Tensor, p: Tensor) -> None:
    m.lerp_(grad, 0.1)
    v.mul_(0.999).addcmul_(grad, grad, value=0.001)
    p.addcdiv_(m, v.abs().sqrt().add_(1e-8), value=-1e-3)


def cat(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y * 2], 1)


def pad(x: Tensor) -> Tensor:
    return F.pad(x, (8, 8))


def scatter_rows(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return torch.index_add(x, 0, index, values)


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(x, dim=(0, 2))[::-1]


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, DROPOUT)


def dropout_complaints(got: Any, args: tuple[Any, ...]) -> list[str]:
    """Check that kept elements are scaled, and that their share is within five standard errors."""
    x = args[0]
    kept = (got != 0) | (x == 0)
    share = float(kept.float().mean())
    error = 5 * math.sqrt(DROPOUT * (1 - DROPOUT) / x.numel())
    wrong = ~torch.isclose(got, x / (1 - DROPOUT), rtol=2e-2) & kept
    found = [f"{int(wrong.sum())} elements are neither zero nor scaled"] if wrong.any() else []
    if abs(share - (1 - DROPOUT)) > error + 1e-3:  # the mean of a float32 of this many elements
        found.append(f"a share of {share:.4f} is kept")
    return found


WIDE = bf16(8192, 8192)
ONE, BUFFER = f32(1), half(1)
TOKENS, WIDTH = 32_768, 2048
ASKED = (
    Row("ln_fp8", ln_fp8, (half(4, 2048, 4096), ONE, BUFFER), mutates=True, over_peer=1.9),
    Row("amax_quant", amax_quant, (half(4, 2048, 4096), ONE, BUFFER), mutates=True, over_peer=1.6),
    Row("dyn_quant_row", dyn_quant_row, (bf16(8192, 4096),), over_peer=1.4),
    Row("softmax", k.softmax, (WIDE,), over_peer=2.0),
    Row("ce", ce, (bf16(8192, 32_000), ints(8192, high=32_000)), over_peer=1.7),
    Row("gelu_bias_fb", k.gelu_bias, (bf16(8192, 4096), bf16(4096)), fb=True, over_peer=1.2),
    Row("mish_fb", F.mish, (WIDE,), fb=True, over_peer=1.2),
    Row("swish_fb", k.swish, (WIDE,), fb=True, over_peer=1.2),
    Row(
        "layer_norm_fb",
        k.layer_norm,
        (bf16(16_384, 2048), bf16(2048), bf16(2048)),
        fb=True,
        over_peer=1.2,
    ),
    Row("rmsnorm_t5_fb", rmsnorm_t5, (bf16(256, 256, 1024), bf16(1024)), fb=True, over_peer=1.2),
)
POINTWISE = (
    Row("add", k.add, (WIDE, WIDE)),
    Row("add_f32", k.add, (f32(8192, 4096), f32(8192, 4096))),
    Row("gelu", F.gelu, (WIDE,)),
    Row("gelu_bias", k.gelu_bias, (bf16(8192, 4096), bf16(4096))),
    Row("swiglu_fb", swiglu, (bf16(8192, 8192), bf16(8192, 8192)), fb=True),
    Row("rope", rope, (bf16(4, 32, 4096, 128), bf16(4096, 128), bf16(4096, 128))),
    Row("dequant", dequant, (Array((8192, 8192), E4M3), f32(8192, 1))),
    Row(
        "adam",
        adam,
        tuple([f32(8192, 4096)] * 4),
        mutates=True,
        bytes_moved=7 * 8192 * 4096 * 4,  # four are read, and three of them written
    ),
    Row("dropout", dropout, (WIDE,), check=dropout_complaints),
    Row("int_add", k.add, (ints(8192, 2048, high=1000), ints(8192, 2048, high=1000))),
)
MOVES = (
    Row("transpose", lambda x: x.t().contiguous(), (WIDE,)),
    Row("transpose_add", transpose_add, (WIDE, WIDE)),
    Row("merge_heads", merge_heads, (bf16(8, 32, 2048, 128),)),
    Row("cat", cat, (bf16(8192, 4096), bf16(8192, 4096))),
    Row("pad", pad, (WIDE,)),
    Row(
        "embedding",
        F.embedding,
        (ints(TOKENS, high=32_000), bf16(32_000, WIDTH)),
        bytes_moved=TOKENS * (2 * WIDTH * 2 + 8),
    ),
    Row(
        "embedding_fb",
        lambda w, i: F.embedding(i, w),
        (bf16(32_000, WIDTH), ints(TOKENS, high=32_000)),
        fb=True,
        is_memory_bound=False,
    ),
    Row(
        "index_add",
        scatter_rows,
        (f32(8192, 1024), ints(TOKENS, high=8192), f32(TOKENS, 1024)),
        is_memory_bound=False,
    ),
)
REDUCTIONS = (
    Row("sum_all", torch.sum, (f32(8192, 8192),)),
    Row("amax_all", torch.amax, (WIDE,)),
    Row("sum_rows", lambda x: x.sum(-1), (WIDE,)),
    Row("sum_columns", lambda x: x.sum(0), (f32(16_384, 4096),)),
    Row("sum_columns_bf16", lambda x: x.sum(0), (WIDE,)),
    Row("statistics", statistics, (f32(64, 256, 3136),)),
    Row("argmax", lambda x: x.argmax(-1), (WIDE,)),
    Row("cumsum", lambda x: x.cumsum(-1), (f32(8192, 4096),)),
    Row("softmax_fb", k.softmax, (WIDE,), fb=True),
    Row("softmax_short", k.softmax, (bf16(65_536, 512),)),
    Row("ce_fb", ce, (bf16(8192, 32_000), ints(8192, high=32_000)), fb=True),
    Row("layer_norm", k.layer_norm, (bf16(16_384, 2048), bf16(2048), bf16(2048))),
    Row(
        "add_layer_norm",
        k.add_layer_norm,
        (bf16(16_384, 2048), bf16(16_384, 2048), bf16(2048), bf16(2048)),
    ),
    Row("rmsnorm_t5", rmsnorm_t5, (bf16(256, 256, 1024), bf16(1024))),
    Row("group_norm", lambda x: F.group_norm(x, 32), (bf16(64, 128, 64, 64),)),
)
KERNELS = (*ASKED, *POINTWISE, *MOVES, *REDUCTIONS)


def three_kernels(x: Tensor, w: Tensor) -> Tensor:
    """A fused kernel, a product, a fused kernel."""
    return torch.softmax(F.gelu(x + 1) @ w * 2, -1)


def one_kernel(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x + 1) * w


def three_loops(x: Tensor, w: Tensor) -> Tensor:
    """Sums down, across, and down again: three kernels and no library."""
    a = (x - x.sum(0)).softmax(-1)
    return (a * w).sum(0).tanh()


TINY = (f32(16, 16), f32(16, 16))
HOST = (
    Row("host_three_kernels", three_kernels, TINY, over_peer=2.0),
    Row("host_one_kernel", one_kernel, TINY, over_peer=1.0),
    Row("host_three_loops", three_loops, TINY, over_peer=1.0),
    Row("host_three_kernels_fb", three_kernels, TINY, fb=True, over_peer=1.0),
)


def gpu_cases(shrink: int = 1) -> dict[str, Case]:
    """Every case by name; `shrink` divides the sizes, to prove the benchmark on a small machine."""
    kernels = [row.case(shrink) for row in KERNELS]
    host = [Case(r.name, "overhead", "16x16", partial(problem, r, 1)) for r in HOST]
    return {case.name: case for case in (*kernels, *host, *model_cases(shrink > 1))}


TARGETS = {row.name: row for row in (*KERNELS, *HOST)}
