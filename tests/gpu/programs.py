"""Programs that between them ask for every kind of GPU kernel.

One list for three uses: values on a GPU, values in Triton's interpreter, and compiling for GPUs
that are not there. `SMALL` suits all three; `LARGE` wants a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.behaviour.row import Behaviour, randn

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
half = partial(randn, dtype=F16)
bf16 = partial(randn, dtype=BF16)
leaf = partial(randn, grad=True)
bf16_leaf = partial(randn, dtype=BF16, grad=True)


def ints(*shape: int, high: int = 7, low: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 5)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def bools(*shape: int) -> Tensor:
    return ints(*shape, high=2).bool()


def gelu_bias(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def at_least_f32(x: Tensor) -> Tensor:
    """The `.float()` of a model, without spoiling the float64 reference."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = at_least_f32(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return weight * (wide * scale).to(weight.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def pooled_channels_last(x: Tensor, w: Tensor) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    return F.adaptive_avg_pool2d(x, 1).flatten(1) @ w


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean((0, 2, 3)), x.var((0, 2, 3))


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def amax_quantise(x: Tensor, scale: Tensor, buffer: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The largest size of a tensor while it is quantised."""
    buffer.fill_(x.abs().amax())
    return saturated(at_least_f32(x) * scale, dtype)


def norm_amax_quantise(x: Tensor, scale: Tensor, buffer: Tensor, *, dtype: torch.dtype) -> Tensor:
    y = F.layer_norm(at_least_f32(x), x.shape[-1:])
    buffer.fill_(y.abs().amax(keepdim=True).reshape(-1)[0])
    return saturated(y * scale, dtype)


def norm_copy_amax(x: Tensor, scale: Tensor, buffer: Tensor, *, dtype: torch.dtype) -> Tensor:
    y = F.layer_norm(at_least_f32(x), x.shape[-1:])
    amax = y.abs().amax()
    buffer.view_as(amax).copy_(amax)
    return saturated(y * scale, dtype)


def quantise_rows(x: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    amax = at_least_f32(x.abs().amax(-1, keepdim=True)).clamp(min=1e-12)
    scale = torch.finfo(dtype).max / amax
    return saturated(at_least_f32(x) * scale, dtype), 1 / scale


def scale_and_buffer(x: Tensor, buffer_dtype: torch.dtype = F16) -> list[Any]:
    return [x, torch.tensor(0.7), torch.zeros(1, dtype=buffer_dtype)]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def adam(p: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> None:
    m.lerp_(grad, 0.1)
    v.mul_(0.999).addcmul_(grad, grad, value=0.001)
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-0.01)


def put_rows(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return torch.index_put(x, (index,), values, accumulate=True)


def three_stages(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(F.gelu(x + 1) @ w * 2, -1)


def bits(x: Tensor, y: Tensor) -> Tensor:
    return ((x & y) | (x << 2)) ^ (y >> 1)


def foreach(*tensors: Tensor) -> list[Tensor]:
    """One body over tensors of many sizes, sums of each, and the tensors scaled by these."""
    made = torch._foreach_lerp(tensors, torch._foreach_exp(tensors), 0.3)
    norms = torch._foreach_norm(made)
    return torch._foreach_div(made, torch._foreach_add(norms, 1.0))


def int_math(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = y.abs() + 1
    return x // z, x % z, torch.div(x, z, rounding_mode="trunc"), x * y, x.clamp(-3, 3)


def both_norms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column reductions of one tensor beside a pointwise result."""
    return x.sum(0), x.amax(1), x * 2


def at_the_limits(x: Tensor, zeros: Tensor) -> tuple[Tensor, ...]:
    """Functions that become infinite: of numbers from -110 to 110, and of zeros of both signs."""
    return torch.exp(x), torch.digamma(zeros), 1 / -zeros, 1 / -zeros.double()


def check_limits(fn: Callable[..., Any]) -> None:
    """Infinities are where eager has them, with its sign, and nothing else is lost."""
    inputs = torch.linspace(-110, 110, 999), torch.tensor([0.0, -0.0, 0.5])
    for got, eager in zip(fn(*inputs), at_the_limits(*inputs), strict=True):
        assert torch.equal(got.isfinite(), eager.isfinite())
        assert torch.equal(got[~got.isfinite()], eager[~eager.isfinite()])


P = Behaviour
POINTWISE = (
    P("add_f32", torch.add, lambda: [randn(33, 70), randn(33, 70)]),
    P("add_bf16_broadcast", torch.add, lambda: [bf16(33, 70), bf16(70)], widens=True),
    P("gelu_bias_fb", gelu_bias, lambda: [leaf(17, 96), leaf(96)]),
    P("gelu_bias_bf16_fb", gelu_bias, lambda: [bf16_leaf(17, 96), bf16_leaf(96)], widens=True),
    P("gelu_erf_fb", F.gelu, lambda: [leaf(1000)]),
    P("mish_fb", F.mish, lambda: [leaf(40, 65)]),
    P("swish_f16_fb", swish, lambda: [half(40, 65, grad=True)], widens=True),
    P("special", lambda x: (x.erf(), x.expm1(), x.log1p(), x.atan()), lambda: [randn(257).abs()]),
    P("powers", lambda x: (x**3, x**0.5, x**-1.5, 2.0**x), lambda: [randn(257).abs() + 0.1]),
    P("float64", lambda x: x.double().sin().exp(), lambda: [randn(33)]),
    P("float64_roots", lambda x: (x.sqrt(), x.rsqrt()), lambda: [randn(33).double().abs() + 1]),
    P("scalar_tensor", lambda x, s: x * s + s, lambda: [randn(33), torch.tensor(1.5)]),
    P("foreach", foreach, lambda: [randn(n) for n in (64, 1, 2049, 300, 5000, 17)]),
    P("zero_elements", lambda x: (x + 1).sum(), lambda: [randn(0, 4)]),
    P("where_bool", lambda m, x: torch.where(m, x, -x) * m, lambda: [bools(9, 33), randn(9, 33)]),
    P("integers", int_math, lambda: [ints(65, low=-9), ints(65, low=-4, high=9)]),
    P("bits_i32", bits, lambda: [ints(70, dtype=torch.int32), ints(70, dtype=torch.int32)]),
    P("bytes", lambda x: (x + 250, x > 3, x.float() / 2), lambda: [ints(99, dtype=torch.uint8)]),
    P("comparisons", lambda x, y: (x < y) & (x != 0) | ~(y >= 1), lambda: [randn(77), randn(77)]),
    P("truth_of_a_scalar", lambda x, y: (x > 0) & (y < 1), lambda: [randn(77), torch.tensor(0.5)]),
    P("constants", lambda x: torch.full_like(x, 0.5).atan().expm1() + x, lambda: [randn(77)]),
    P("rounding", lambda x: (x.floor(), x.ceil(), x.round(), x.trunc()), lambda: [randn(99) * 9]),
    P(
        "nan_and_inf",
        lambda x, y: (torch.maximum(x / y, x), (x / y).clamp(-1, 1)),
        lambda: [ints(99, low=-2, high=3).float(), ints(99, low=-1, high=2).float()],
    ),
    P("rope", rope, lambda: [bf16(2, 3, 17, 16), bf16(17, 16), bf16(17, 16)], widens=True),
)

REDUCTIONS = (
    P("sum_all", torch.sum, lambda: [randn(130, 70)]),
    P("sum_rows", lambda x: x.sum(-1), lambda: [randn(33, 70)]),
    P("sum_columns", lambda x: x.sum(0), lambda: [randn(130, 70)]),
    P("sum_middle", lambda x: x.sum(1), lambda: [randn(5, 33, 17)]),
    P("sum_bf16", lambda x: x.sum(0), lambda: [bf16(130, 70)], widens=True),
    P("mean_var", batch_statistics, lambda: [randn(3, 5, 7, 9)]),
    P("amax_amin", lambda x: (x.amax(1), x.amin(0), x.amax()), lambda: [randn(33, 70)]),
    P("argmax", lambda x: (x.argmax(1), x.argmin(0), x.argmax()), lambda: [randn(33, 70)]),
    P("any_all", lambda x: (x.any(1), x.all(0), x.sum()), lambda: [bools(33, 70)]),
    P("prod", lambda x: (x * 0.1 + 1).prod(1), lambda: [randn(9, 33)]),
    P("rows_and_columns", both_norms, lambda: [randn(65, 34)]),
    P("norm_of_all", torch.linalg.vector_norm, lambda: [randn(100, 33)]),
    P("int_sums", lambda x: (x.sum(0), x.amax(1)), lambda: [ints(9, 70)]),
)

ROWS = (
    P("softmax", lambda x: torch.softmax(x, -1), lambda: [randn(33, 70)]),
    P("softmax_bf16_fb", lambda x: torch.softmax(x, -1), lambda: [bf16_leaf(9, 130)], widens=True),
    P("softmax_columns", lambda x: torch.softmax(x, 0), lambda: [randn(70, 33)]),
    P("log_softmax_fb", lambda x: F.log_softmax(x, -1), lambda: [leaf(33, 70)]),
    P(
        "masked_softmax",
        lambda x, m: x.masked_fill(m, float("-inf")).softmax(-1),
        lambda: [randn(9, 40), torch.ones(9, 40).triu(1).bool()],
    ),
    P("layer_norm", layer_norm, lambda: [randn(33, 96), randn(96), randn(96)]),
    P("layer_norm_fb", layer_norm, lambda: [leaf(33, 96), leaf(96), leaf(96)]),
    P(
        "layer_norm_bf16_fb",
        layer_norm,
        lambda: [bf16_leaf(33, 96), bf16_leaf(96), bf16_leaf(96)],
        widens=True,
    ),
    P("rms_norm_fb", rms_norm, lambda: [leaf(5, 7, 64), leaf(64)]),
    P("rms_norm_bf16_fb", rms_norm, lambda: [bf16_leaf(5, 7, 64), bf16_leaf(64)], widens=True),
    P("group_norm_fb", lambda x: F.group_norm(x, 2), lambda: [leaf(2, 4, 5, 5)]),
    P("cross_entropy_fb", F.cross_entropy, lambda: [leaf(17, 130), ints(17, high=130)]),
    P(
        "cross_entropy_bf16",
        lambda x, t: F.cross_entropy(at_least_f32(x), t),
        lambda: [bf16(17, 130), ints(17, high=130)],
        widens=True,
    ),
    P("logsumexp_fb", lambda x: x.logsumexp(-1), lambda: [leaf(17, 65)]),
    P("normalize_fb", lambda x: F.normalize(x, dim=-1), lambda: [leaf(17, 65)]),
    P("cumsum", lambda x: (x.cumsum(-1), x.cumsum(0)), lambda: [randn(33, 70)]),
    P("cumsum_i64", lambda x: x.cumsum(-1), lambda: [ints(5, 70)]),
    P(
        "cumprod_cummax",
        lambda x: ((x * 0.1 + 1).cumprod(-1), x.cummax(-1)[0]),
        lambda: [randn(5, 70)],
    ),
    P("sort", lambda x: x.sort(stable=True, dim=-1), lambda: [randn(5, 70)]),
)

MOVES = (
    P("transpose", lambda x: x.t().contiguous(), lambda: [randn(65, 130)]),
    P("transpose_add", lambda x, y: x + y.t(), lambda: [bf16(65, 70), bf16(70, 65)], widens=True),
    P(
        "permute",
        lambda x: (x.permute(0, 2, 1, 3) * 2).reshape(2, 9, -1),
        lambda: [randn(2, 4, 9, 8)],
    ),
    P("strided_inputs", lambda x, y: x + y, lambda: [randn(33, 140)[:, ::2], randn(70, 33).t()]),
    P("cat", lambda x, y: torch.cat([x, y * 2, x], 1), lambda: [randn(9, 33), randn(9, 7)]),
    P("cat_fb", lambda x, y: torch.cat([x, y.exp()], 0), lambda: [leaf(9, 33), leaf(4, 33)]),
    P("pad_fb", lambda x: F.pad(x, (1, 2, 3, 0), value=0.5) * 2, lambda: [leaf(9, 33)]),
    P("stack_flip_roll", lambda x: torch.stack([x.flip(0), x.roll(3, 1)]), lambda: [randn(9, 33)]),
    P("gather", lambda x, i: x.gather(1, i), lambda: [randn(9, 7), ints(9, 33)]),
    P("embedding", F.embedding, lambda: [ints(4, 9, high=50), randn(50, 24)]),
    P(
        "embedding_fb",
        lambda i, w: F.embedding(i, w) * 2,
        lambda: [ints(4, 9, high=50), leaf(50, 24)],
    ),
    P("index_put", put_rows, lambda: [randn(50, 24), ints(33, high=50), randn(33, 24)]),
    P(
        "scatter_add",
        lambda x, i, y: x.scatter_add(0, i, y),
        lambda: [randn(9, 33), ints(40, 33, high=9), randn(40, 33)],
    ),
    P(
        "chain_of_scatters",
        lambda x, i, y: (x.index_add(0, i, y).index_add(0, i, y * 2) + 1).index_add(0, i, y) @ x.T,
        lambda: [randn(9, 12), ints(20, high=9), randn(20, 12)],
    ),
    P("index_select", lambda x, i: x[:, i].relu(), lambda: [randn(9, 33), ints(20, high=33)]),
    P(
        "tril_arange",
        lambda x: x.tril() + torch.arange(33, device=x.device),
        lambda: [randn(9, 33)],
    ),
    P(
        "avg_max_pool_fb",
        lambda x: F.avg_pool2d(F.max_pool2d(x, 2), 2),
        lambda: [leaf(2, 3, 12, 12)],
    ),
    P("upsample", lambda x: F.interpolate(x, scale_factor=2.0), lambda: [randn(2, 3, 5, 5)]),
)

FLOAT8 = (
    *(
        P(
            f"{kind}_{name}_{str(buffer)[6:]}",
            partial(function, dtype=dtype),
            partial(lambda b: scale_and_buffer(half(2, 10, 70), b), buffer),
            widens=True,
        )
        for kind, function in (
            ("amax_quantise", amax_quantise),
            ("norm_amax_quantise", norm_amax_quantise),
            ("norm_copy_amax", norm_copy_amax),
        )
        for name, dtype, buffer in (("e4m3", E4M3, F16), ("e5m2", E5M2, F32))
    ),
    P(
        "quantise_rows_e4m3",
        partial(quantise_rows, dtype=E4M3),
        lambda: [bf16(17, 130)],
        widens=True,
    ),
    P(
        "dequantise_e4m3",
        lambda x, s: x.float() * s,
        lambda: [randn(17, 70).to(E4M3), randn(17, 1)],
    ),
    P("dequantise_e5m2", lambda x: x.to(BF16) + 1, lambda: [randn(17, 70).to(E5M2)]),
    P("e4m3_there_and_back", lambda x: x.to(E4M3).to(F32), lambda: [randn(999) * 30]),
    P("e5m2_there_and_back", lambda x: x.to(E5M2).to(F32), lambda: [randn(999) * 30]),
)

EFFECTS = (
    P("in_place", lambda x: x.mul_(2).add_(1).sum(), lambda: [randn(33)], num_calls=2),
    P(
        "in_place_rows",
        lambda x, i, y: x.index_copy_(0, i, y).sum(0) + x.index_add_(0, i, y)[0],
        lambda: [randn(33, 70), torch.tensor([4, 30]), randn(2, 70)],
        num_calls=2,
    ),
    P("in_place_view", lambda x: x[:, ::2].copy_(x[:, 1::2] * 2), lambda: [randn(9, 34)]),
    P("adam", adam, lambda: [randn(99), randn(99), randn(99), randn(99).abs()], num_calls=2),
    P("dropout", lambda x: F.dropout(x, 0.3), lambda: [randn(999)]),
    P("dropout_fb", lambda x: F.dropout(x.exp(), 0.3), lambda: [leaf(999)]),
    P("three_stages", three_stages, lambda: [randn(16, 16), randn(16, 16)]),
    P(
        "linear_fb",
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        lambda: [leaf(17, 32), leaf(40, 32), leaf(40)],
    ),
    P("misaligned", lambda x, y: x[1:] * y[3:-2] + 1, lambda: [randn(130), randn(134)]),
    P(
        "pooled_channels_last_fb",
        pooled_channels_last,
        lambda: [leaf(2, 8, 4, 6), leaf(8, 3)],
    ),
    P(
        "strided_scatter",
        lambda x, y: torch.as_strided_scatter(x.exp(), y + 1, (5, 3), (13, 4), 2),
        lambda: [randn(9, 11), randn(5, 3)],
    ),
    P(
        "storage_of_a_window",
        lambda x: x.as_strided((4, 3), (3, 1), 2) * x[0] + 1,
        lambda: [randn(40)[3:15].view(4, 3)],
    ),
    P("output_is_input", lambda x: (x, x.view(-1), x + 1), lambda: [randn(9, 4)]),
    P(
        "dynamic_softmax",
        lambda x: x.softmax(-1) + x.shape[0],
        lambda: [randn(33, 70)],
        dynamic=True,
    ),
    P(
        "dynamic_norm_fb",
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda: [leaf(9, 70)],
        dynamic=True,
    ),
    P("dynamic_columns", lambda x: x.sum(0).cumsum(0), lambda: [randn(33, 70)], dynamic=True),
)

PRODUCTS = (
    P("small_product_fb", lambda x, y: F.gelu(x + 1) @ y * 2, lambda: [leaf(5, 7), leaf(7, 6)]),
    P("small_product_turned", lambda x, y: x.t() @ y.t(), lambda: [randn(7, 5), randn(6, 7)]),
    P("small_product_of_one", lambda x, y: x @ y, lambda: [randn(5, 1), randn(1, 6)]),
    P("small_product_bf16", torch.mm, lambda: [bf16(5, 33), bf16(33, 6)], widens=True),
    P("small_linear_fb", F.linear, lambda: [leaf(3, 8), leaf(5, 8), leaf(5)]),
)

SMALL = (*POINTWISE, *REDUCTIONS, *ROWS, *MOVES, *FLOAT8, *EFFECTS, *PRODUCTS)

LARGE = (
    P("large_sum_all", torch.sum, lambda: [randn(3000, 4000)]),
    P("large_sum_columns", lambda x: x.sum(0), lambda: [randn(20_000, 300)]),
    P("large_sum_rows", lambda x: x.sum(1), lambda: [randn(5, 1_000_003)]),
    P("large_softmax", lambda x: x.softmax(-1), lambda: [bf16(64, 70_001)], widens=True),
    P("large_softmax_fb", lambda x: x.softmax(-1), lambda: [leaf(300, 5000)]),
    P("large_norm_fb", layer_norm, lambda: [leaf(3000, 1000), leaf(1000), leaf(1000)]),
    P("large_norm_long_rows_fb", layer_norm, lambda: [leaf(3, 70_000), leaf(70_000), leaf(70_000)]),
    P(
        "large_cross_entropy_fb",
        F.cross_entropy,
        lambda: [leaf(512, 32_000), ints(512, high=32_000)],
    ),
    P("large_cumsum", lambda x: (x.cumsum(-1), x.cumsum(0)), lambda: [randn(3000, 2000)]),
    P("large_transpose", lambda x: x.t() + 1, lambda: [bf16(3001, 2003)], widens=True),
    P("large_embedding_fb", F.embedding, lambda: [ints(40, 512, high=999), leaf(999, 768)]),
    P(
        "large_norm_amax_quantise",
        partial(norm_amax_quantise, dtype=E4M3),
        lambda: scale_and_buffer(half(4, 512, 4096)),
        widens=True,
    ),
    P(
        "large_quantise_rows",
        partial(quantise_rows, dtype=E4M3),
        lambda: [bf16(1000, 4096)],
        widens=True,
    ),
    P("large_argmax", lambda x: (x.argmax(1), x.argmax()), lambda: [randn(300, 9001)]),
    P("large_in_place", lambda x: x.mul_(2).add_(1), lambda: [randn(1 << 22)], num_calls=2),
)
