"""Kernels of the baselines: pointwise, norms, softmax, losses, float8, products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case, Function, Problem, backward_problem, forward_problem

E4M3_MAX = 448.0


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def gelu_bias(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def hard_swish(x: Tensor) -> Tensor:
    return x * F.relu6(x + 3) / 6


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def add_layer_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x + y, x.shape[-1:], weight, bias)


def rmsnorm_t5(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def scaled_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x * 0.5, dim=-1)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def layer_norm_to_e4m3(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = F.layer_norm(x, x.shape[-1:], weight, bias).float()
    scale = E4M3_MAX / y.abs().amax().clamp(min=1e-12)
    return (y * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def cast(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def round_trip(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


def mm_bias_relu(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return F.relu(torch.addmm(bias, a, b))


def mm_gelu(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(torch.addmm(bias, a, b), approximate="tanh")


def mm_plus_mm(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return a @ b + c @ d


def addmm_cat(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return torch.cat([torch.addmm(b1, x, w1), torch.addmm(b2, x, w2)], dim=1)


def conv1x1(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, weight, bias))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ v


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def targets() -> Tensor:
    return torch.randint(0, 32_000, (512,))


def causal() -> Tensor:
    return torch.ones(512, 512, dtype=torch.bool).triu(1)


def half(*shape: int) -> Tensor:
    return randn(*shape, dtype=torch.float16)


def float8(*shape: int, dtype: torch.dtype) -> Tensor:
    return randn(*shape).to(dtype)


Maker = partial[Tensor]


def problem(function: Function, makers: Sequence[Maker], is_backward: bool) -> Problem:
    torch.manual_seed(0)
    args: list[Any] = [make() for make in makers]
    return (backward_problem if is_backward else forward_problem)(function, args)


def rows(
    name: str,
    function: Function,
    *makers: Maker,
    what: str = "",
    backward: bool = False,
    memory: bool = True,
) -> list[Case]:
    """The forward case and, where the baselines list it, the one with backward (`_fb`)."""
    forward = Case(name, "kernel", what, partial(problem, function, makers, False), memory)
    both = Case(f"{name}_fb", "kernel", what, partial(problem, function, makers, True))
    return [forward, both] if backward else [forward]


WIDE = partial(randn, 1024, 4096)
ROWS = partial(randn, 4096, 1024)
VECTOR = partial(randn, 1024)
T5 = partial(randn, 256, 256, 1024)
LOGITS = partial(randn, 512, 32_000)
HALF = partial(half, 4, 2048, 4096)
HEADS = partial(randn, 4, 8, 512, 64)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def products() -> list[Case]:
    found: list[Case] = []
    for name, function in (("mm_bias_relu", mm_bias_relu), ("mm_gelu", mm_gelu)):
        for n in (512, 1024, 2048):
            makers = (partial(randn, n, n), partial(randn, n, n), partial(randn, n))
            found += rows(f"{name}_{n}", function, *makers, memory=False)
    square = partial(randn, 1024, 1024)
    found += rows("mm_plus_mm_1024", mm_plus_mm, *[square] * 4, what="a@b + c@d", memory=False)
    layer = (partial(randn, 512, 512), partial(randn, 512))
    found += rows(
        "addmm_cat",
        addmm_cat,
        partial(randn, 1024, 512),
        *layer,
        *layer,
        what="cat of two addmm, 1024x512x512",
        memory=False,
    )
    image = (partial(randn, 4, 256, 56, 56), partial(randn, 64, 256, 1, 1), partial(randn, 64))
    found += rows("conv1x1", conv1x1, *image, what="(4,256,56,56) to 64 + relu", memory=False)
    found += rows("attn", attention, *[HEADS] * 3, what="by hand, (4,8,512,64)", memory=False)
    return found + rows("attn_mask", masked_attention, *[HEADS] * 3, partial(causal), memory=False)


def float8_rows() -> list[Case]:
    found: list[Case] = []
    for name, dtype in (("e4m3", E4M3), ("e5m2", E5M2)):
        narrow = partial(float8, 1024, 4096, dtype=dtype)
        found += rows(f"{name}_q", partial(cast, dtype=dtype), WIDE, what=f"float32 to {name}")
        found += rows(
            f"{name}_dq", partial(cast, dtype=torch.float32), narrow, what=f"{name} to float32"
        )
        found += rows(f"{name}_rt", partial(round_trip, dtype=dtype), WIDE, what="and back")
    return found


def kernels() -> list[Case]:
    """All of them, in the order of the baselines' table."""
    norm = (VECTOR, VECTOR)
    half_norm = (partial(half, 4096), partial(half, 4096))
    wide, narrow = "1024x4096", "4096x1024"
    return [
        *rows("add", add, WIDE, WIDE, what=f"x + y, {wide}"),
        *rows("gelu_bias", gelu_bias, WIDE, partial(randn, 4096), what="tanh-gelu", backward=True),
        *rows("gelu_erf", F.gelu, WIDE, what="erf gelu"),
        *rows("mish", F.mish, WIDE, backward=True),
        *rows("swish", swish, WIDE, backward=True),
        *rows("hard_swish", hard_swish, WIDE, backward=True),
        *rows("layer_norm", layer_norm, ROWS, *norm, what=narrow, backward=True),
        *rows("add_layer_norm", add_layer_norm, ROWS, ROWS, *norm, what=narrow),
        *rows("rmsnorm_t5", rmsnorm_t5, T5, VECTOR, what="256x256x1024", backward=True),
        *rows("softmax", scaled_softmax, ROWS, what=f"x*0.5, {narrow}"),
        *rows("softmax_32k", softmax, partial(randn, 256, 32_000), what="256x32000"),
        *rows("xent_32k", F.cross_entropy, LOGITS, partial(targets), backward=True),
        *rows("ln_fp8", layer_norm_to_e4m3, HALF, *half_norm, what="norm of half, amax, e4m3"),
        *float8_rows(),
        *products(),
    ]
