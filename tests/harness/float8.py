"""Casts and quantisers of eight bits, with inputs that reach every code, for any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = (E4M3, E5M2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Signalling and quiet NaN of both signs, infinities, the least numbers, zeros.
_SPECIAL_BITS = (
    0x7F800001, 0x7FC00000, 0xFFC00000, 0xFFFFFFFF, 0x7FFFFFFF, 0xFF800001, 0x7F800000, 0xFF800000,
    0x00000001, 0x80000001, 0x007FFFFF, 0x00400000, 0x00400001, 0x00000000, 0x80000000,
)  # fmt: skip


def every_code(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def wide_inputs() -> dict[torch.dtype, Tensor]:
    """All halves; of floats and doubles ties, their neighbours, specials, and random bits."""
    codes = torch.cat([every_code(dtype).float() for dtype in FLOAT8])
    numbers = codes[codes.isfinite()].unique()
    ties = ((numbers[1:].double() + numbers[:-1].double()) / 2).float()
    near = torch.cat([numbers, ties, -numbers, -ties])
    random = torch.Generator().manual_seed(0)
    some = torch.randint(-(2**31), 2**31, (100_000,), generator=random).to(torch.int32)
    special = torch.tensor(_SPECIAL_BITS).to(torch.int32)
    floats = torch.cat([near, *_neighbours(near), some.view(torch.float32)])
    floats = torch.cat([floats, special.view(torch.float32)])
    doubles = torch.cat([floats.double(), *_neighbours(near.double())])
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return {
        torch.float16: halves.view(torch.float16),
        torch.bfloat16: halves.view(torch.bfloat16),
        torch.float32: floats,
        torch.float64: doubles,
    }


def _neighbours(x: Tensor) -> list[Tensor]:
    return [torch.nextafter(x, torch.full_like(x, way * torch.inf)) for way in (-1, 1)]


def narrowed(wide: Mapping[torch.dtype, Tensor]) -> list[Tensor]:
    """Every wide dtype cast to every dtype of eight bits."""
    return [wide[source].to(dtype) for source in WIDE for dtype in FLOAT8]


def round_trips(wide: Mapping[torch.dtype, Tensor]) -> list[Tensor]:
    return [wide[source].to(dtype).to(source) for source in WIDE for dtype in FLOAT8]


def widened(codes: Mapping[torch.dtype, Tensor]) -> list[Tensor]:
    return [codes[dtype].to(source) for source in WIDE for dtype in FLOAT8]


CAST_NAMES = [f"{source} and {dtype}" for source in WIDE for dtype in FLOAT8]


def differences(got: Tensor, eager: Tensor) -> Tensor:
    """Where the bits differ. Of NaN in wide types only the sign counts: hardware sets the rest."""
    assert got.dtype == eager.dtype
    assert got.shape == eager.shape
    width = got.element_size()
    mine, theirs = (t.contiguous().view(_BITS[width]) for t in (got, eager))
    differ = mine != theirs
    if width > 1:
        is_nan = got.isnan() & eager.isnan()
        differ &= ~(is_nan & ((mine < 0) == (theirs < 0)))
    return differ


def assert_same_bits(got: Any, eager: Any, names: Iterable[str] = ("",)) -> None:
    """Results are equal bit for bit; the failure names those that are not."""
    mine, theirs = ([t] if isinstance(t, Tensor) else list(t) for t in (got, eager))
    titles = [*names] if len(mine) > 1 else [*names][:1]
    titles += [str(i) for i in range(len(titles), len(mine))]
    wrong = []
    for name, a, b in zip(titles, mine, theirs, strict=True):
        differ = differences(a, b)
        if differ.any():
            first = tuple(differ.nonzero()[0].tolist())
            at = f"first at {first}: {a[first].float().item()}, not {b[first].float().item()}"
            wrong.append(f"{name}: {int(differ.sum())} of {differ.numel()} differ, {at}")
    assert not wrong, "\n".join(wrong)


# ---- quantisers ----------------------------------------------------------------------------------


def saturated(x: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def scale_of(amax: Tensor) -> Tensor:
    return amax.float().clamp(min=1e-12) / torch.finfo(E4M3).max


def by_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = scale_of(x.abs().amax())
    return saturated(x.float() / scale), scale


def by_axis(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    scale = scale_of(x.abs().amax(axis, keepdim=True))
    return saturated(x.float() / scale), scale


def by_blocks_of_a_row(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.view(x.shape[0], -1, 128)
    scale = scale_of(blocks.abs().amax(-1, keepdim=True))
    return saturated(blocks.float() / scale).view(x.shape), scale.squeeze(-1)


def by_square_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.view(x.shape[0] // 128, 128, -1, 128)
    scale = scale_of(blocks.abs().amax((1, 3), keepdim=True))
    return saturated(blocks.float() / scale).view(x.shape), scale.squeeze(3).squeeze(1)


def by_rows_to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 127
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def by_rows_to_uint8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = x.amin(-1, keepdim=True).float(), x.amax(-1, keepdim=True).float()
    scale = ((high - low) / 255).clamp(min=1e-12)
    zero = (-low / scale).round()
    return (x.float() / scale + zero).round().clamp(0, 255).to(torch.uint8), scale, zero


def with_transpose(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The backward of a matmul reads the transposed copy."""
    small = saturated(x.float() * scale)
    return small, small.t().contiguous()


def amax_alone(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    return saturated(x.abs().amax().float() * scale, dtype)


def with_amax(x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Scaled by an earlier maximum, while this one is recorded."""
    amax.fill_(x.abs().amax())
    return saturated(x.float() * scale, dtype)


def norm_filled_amax(
    x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype = E4M3, keepdim: bool = False
) -> Tensor:
    y = F.layer_norm(x.float(), x.shape[-1:])
    amax.fill_(y.abs().amax(keepdim=keepdim).reshape(-1)[0])
    return saturated(y * scale, dtype)


def norm_copied_amax(x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    y = F.layer_norm(x.float(), x.shape[-1:])
    largest = y.abs().amax()
    amax.view_as(largest).copy_(largest)
    return saturated(y * scale, dtype)


def rms_norm_with_amax(x: Tensor, weight: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
    return with_amax(F.rms_norm(x, x.shape[-1:], weight), scale, amax)


def residual_norm(
    x: Tensor, residual: Tensor, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, norm_filled_amax(total, scale, amax)


def gelu_with_amax(x: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
    return with_amax(F.gelu(x), scale, amax)


def gated_with_amax(x: Tensor, gate: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
    return with_amax(F.silu(gate) * x, scale, amax)


def gated_in_blocks(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return by_blocks_of_a_row(F.silu(gate) * x)


def scaled_in_halves(x: Tensor) -> Tensor:
    """Eager rounds each step to bfloat16 before the cast."""
    return ((x * 1.7 + 0.3) / 3).to(E4M3)


@dataclass(frozen=True, slots=True)
class Quantiser:
    """A program, its inputs, and the number of kernels it compiles to on each kind of device."""

    name: str
    function: Callable[..., Any]
    inputs: Callable[[], list[Tensor]]
    num_kernels: int = 1

    def __str__(self) -> str:
        return self.name


def halves(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=random).to(dtype)


def _scaled(*shape: int, count: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Tensors of a shape, a scale, and a buffer for the maximum."""
    tensors = [halves(*shape, dtype=dtype, seed=i) for i in range(count)]
    return [*tensors, torch.tensor(0.7), torch.zeros(1, dtype=dtype)]


Q = Quantiser
_MATRIX = partial(halves, 256, 384)
_TOKENS = (4, 33, 160)
QUANTISERS = (
    # A maximum of all elements is known after all of them were read; then come the scale, the cast.
    Q("tensor scale", by_tensor, lambda: [_MATRIX()], num_kernels=3),
    Q("column scale", partial(by_axis, axis=0), lambda: [_MATRIX()], num_kernels=3),
    Q("row scale", partial(by_axis, axis=-1), lambda: [_MATRIX()]),
    Q("row scale of float16", partial(by_axis, axis=-1), lambda: [_MATRIX(dtype=torch.float16)]),
    Q("row scale of float32", partial(by_axis, axis=-1), lambda: [_MATRIX(dtype=torch.float32)]),
    Q("blocks of 1x128", by_blocks_of_a_row, lambda: [_MATRIX()]),
    Q("blocks of 128x128", by_square_blocks, lambda: [_MATRIX()]),
    Q("row scale to int8", by_rows_to_int8, lambda: [_MATRIX()]),
    Q("row scale and zero to uint8", by_rows_to_uint8, lambda: [_MATRIX()]),
    Q("transposed copy", with_transpose, lambda: [_MATRIX(), torch.tensor(0.7)]),
    Q("amax alone", amax_alone, lambda: [halves(*_TOKENS), torch.tensor(0.2)], num_kernels=2),
    Q("amax in a buffer", with_amax, lambda: _scaled(*_TOKENS, dtype=torch.float16)),
    Q("layer norm", norm_filled_amax, lambda: _scaled(*_TOKENS, dtype=torch.float16)),
    Q("rms norm", rms_norm_with_amax, lambda: [halves(*_TOKENS), halves(160), *_scaled(1)[1:]]),
    Q("residual and norm", residual_norm, lambda: _scaled(*_TOKENS, count=2)),
    Q("gelu", gelu_with_amax, lambda: _scaled(*_TOKENS)),
    Q("gated", gated_with_amax, lambda: _scaled(*_TOKENS, count=2)),
    Q("gated in blocks", gated_in_blocks, lambda: [_MATRIX(), _MATRIX(seed=1)]),
    Q("chain of halves", scaled_in_halves, lambda: [_MATRIX()]),
)
# Sums are added in another order than eager's, and exponentials are other polynomials: the last bit
# of a float may differ, which moves few values across a tie.
INEXACT = frozenset(
    {"layer norm", "rms norm", "residual and norm", "gelu", "gated", "gated in blocks"}
)


def check_quantised(row: Quantiser, got: Any, eager: Any, mine: Any = (), theirs: Any = ()) -> None:
    """Results, and the inputs afterwards, have eager's bits, or nearly where sums differ."""
    results, expected = ([t] if isinstance(t, Tensor) else [*t] for t in (got, eager))
    pairs = list(zip([*results, *mine], [*expected, *theirs], strict=True))
    if row.name not in INEXACT:
        assert_same_bits([a for a, _ in pairs], [b for _, b in pairs], [row.name])
        return
    for a, b in pairs:
        rtol, atol = _NEIGHBOURS[a.element_size()]
        torch.testing.assert_close(a.float(), b.float(), rtol=rtol, atol=atol)
        assert differences(a, b).float().mean() < _MOST_MOVED or a.numel() < 1000, row.name


# By bytes: how far the next number of a type is, and the least number.
_NEIGHBOURS = {1: (2.0**-3, 2.0**-9), 2: (2.0**-7, 2.0**-24), 4: (1e-5, 1e-6)}
_MOST_MOVED = 1e-3


# ---- scaled matmuls ------------------------------------------------------------------------------


def with_weight(
    x: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None,
    *, out: torch.dtype, is_first_transposed: bool = False,
) -> Tensor:  # fmt: skip
    """x @ weight.T: the cast before or after the transpose, both give columns in order."""
    a, b = x.to(E4M3), weight.t().to(E4M3) if is_first_transposed else weight.to(E4M3).t()
    return torch._scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=out)


def quantised_both(x: Tensor, weight: Tensor, *_: Any, axis: int | None = None) -> Tensor:
    """Both operands and their scales are computed in the program."""
    if axis is None:
        (a, scale_a), (b, scale_b) = by_tensor(x), by_tensor(weight)
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16)
    (a, scale_a), (b, scale_b) = by_axis(x, axis), by_axis(weight, axis)
    return torch._scaled_mm(a, b.t(), scale_a, scale_b.t(), out_dtype=torch.bfloat16)


def made_column_major(
    x: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor, *_: Any
) -> Tensor:
    """The weight is rearranged by the program itself, as the gradient of an input needs it."""
    b = (weight.t().contiguous() * 1.5).to(E4M3).t().contiguous().t()
    return torch._scaled_mm(x.to(E4M3), b, scale_a, scale_b, out_dtype=torch.bfloat16)


def all_three(x: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor, *_: Any) -> list[Tensor]:
    """The matmuls of a training step: result, gradient of the input, gradient of the weight."""
    one = scale_a * scale_b
    a, b = x.to(E4M3), weight.to(E4M3)
    mm = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    grad = mm(a, b.t()).to(E5M2)
    columns = b.t().contiguous().t()
    return [mm(grad, columns), mm(grad.t().contiguous(), a.t().contiguous().t())]


@cache
def cpu_takes_row_scales() -> bool:
    """Whether eager multiplies with scales of rows on a CPU, as PyTorch 2.11 does not.

    Eager itself is asked: what a build can do is not in its version.
    """
    codes, scales = torch.ones(16, 16).to(E4M3), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), scales, scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class ScaledMatmul:
    """A program with `torch._scaled_mm`; scales of tensors or of rows, with a bias or without."""

    name: str
    function: Callable[..., Any]
    has_row_scales: bool = False
    bias: torch.dtype | None = None
    makes_row_scales: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def is_by_row(self) -> bool:
        return self.has_row_scales or self.makes_row_scales

    def inputs(self, num_rows: int = 16, device: str = "cpu") -> list[Any]:
        x, weight = halves(num_rows, 64), halves(48, 64, seed=1)
        scales = [torch.tensor(0.5), torch.tensor(2.0)]
        if self.has_row_scales:
            scales = [torch.rand(num_rows, 1) + 0.5, torch.rand(1, 48) + 0.5]
        bias = None if self.bias is None else halves(48, dtype=self.bias)
        return [None if t is None else t.to(device) for t in (x, weight, *scales, bias)]


_BF16, _F16 = torch.bfloat16, torch.float16
SCALED_MATMULS = (
    ScaledMatmul("tensor scales", partial(with_weight, out=_BF16)),
    ScaledMatmul("tensor scales and bias", partial(with_weight, out=_BF16), bias=_BF16),
    ScaledMatmul("to float16", partial(with_weight, out=_F16), bias=_F16),
    ScaledMatmul("row scales", partial(with_weight, out=_BF16), has_row_scales=True),
    ScaledMatmul("row scales and bias", partial(with_weight, out=_BF16), True, _BF16),
    ScaledMatmul("transposed first", partial(with_weight, out=_BF16, is_first_transposed=True)),
    ScaledMatmul("quantised by tensor", quantised_both),
    ScaledMatmul("quantised by row", partial(quantised_both, axis=-1), makes_row_scales=True),
    ScaledMatmul("made column-major", made_column_major),
    ScaledMatmul("training step", all_three),
)


def with_random_weight(x: Tensor, bias: Tensor) -> Tensor:
    """Everything but x and the bias is made in the program, the scales as tensors of one number."""
    scale = 1 / torch.ones(1, device=x.device)
    weight = torch.rand(32, 16, device=x.device, dtype=bias.dtype).T.to(E4M3)
    return torch._scaled_mm(x, weight, scale, scale, bias, out_dtype=bias.dtype)


def check_random_weight(device: str, dtype: torch.dtype, candidate: Callable[..., Tensor]) -> None:
    """Sizes change from call to call; a row of 16 products of numbers up to 1, and the bias."""
    bias = torch.rand(32, device=device, dtype=dtype)
    for num_rows in (16, 15):
        x = torch.rand(num_rows, 16, device=device, dtype=dtype).to(E4M3)
        result = candidate(x, bias)
        assert result.shape == (num_rows, 32)
        assert result.dtype == dtype
        assert bool(((result >= 0) & (result <= 17)).all())
