"""Linear layers with weights of eight bits or fewer: a matmul that dequantises on the way in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

import perfuse
from perfuse.autotune.known_contractions import is_amd_avx512, is_intel_with_pairs
from perfuse.context import Context
from perfuse.target import machine_isas
from perfuse.testing import fresh_cache
from tests.harness.backend import compiled
from tests.harness.compare import assert_as_good_as_eager

ISAS = [isa for isa in ("avx512", "avx2") if isa in machine_isas()]
BF16, F32 = torch.bfloat16, torch.float32
N, GROUP = 531, 50
K = 10 * GROUP  # neither whole vectors nor a power of two


def after(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
    return linear(x, w.to(x.dtype)) * s[:, 0]


def before(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
    return gelu(linear(x, w.to(x.dtype) * s[:, :1]))


def grouped(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
    wide = w.view(N, -1, GROUP).to(x.dtype) * s[..., None]
    return linear(x, wide.view(N, K))


def shifted(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
    wide = (w.view(N, -1, GROUP).to(x.dtype) - z[..., None]) * s[..., None]
    return linear(x, wide.view(N, K)) + x.sum()


def unpacked(x: Tensor, low: Tensor, high: Tensor, s: Tensor, z: Tensor) -> Tensor:
    pairs = torch.stack([low, high], -1).view(N, -1, GROUP).to(x.dtype)
    return linear(x, ((pairs - z[..., None]) * s[..., None]).view(N, K))


def int4(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
    return unpacked(x, w & 15, w >> 4, s, z)


def high_first(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
    return gelu(unpacked(x, (w >> 4).to(x.dtype), (w & 15).to(x.dtype), s, z))


def signed(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
    w = w.view(torch.int8)
    return unpacked(x, (w << 4) >> 4, w >> 4, s, z)


def by_channel(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
    pairs = torch.stack([w & 15, w >> 4], -1).flatten(-2)
    return linear(x, (pairs.to(x.dtype) - 8) * s[:, :1])


def operands(rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    w = torch.randint(-128, 128, (N, K), dtype=torch.int8)
    scales = (torch.rand(N, K // GROUP) / 64).to(dtype)
    zeros = torch.randint(-4, 4, scales.shape).to(dtype)
    return torch.randn(rows, K, dtype=dtype), w, scales, zeros


def check(fn: Callable[..., Tensor], given: tuple[Tensor, ...]) -> None:
    exact = fn(*(x.double() if x.is_floating_point() else x for x in given))
    assert_as_good_as_eager(compiled(fn)(*given), fn(*given), exact)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("fn", "rows", "dtype"),
    [
        (after, 1, BF16),
        (before, 3, BF16),
        (grouped, 1, BF16),
        (grouped, 9, F32),
        (shifted, 6, BF16),
    ],
)
def test_weights_are_dequantised_inside_the_matmul(
    fn: Callable[..., Tensor], rows: int, dtype: torch.dtype, isa: str
) -> None:
    given = operands(rows, dtype)
    with perfuse.config.patch({"cpu.simd": isa, "verify": "memory"}):
        check(fn, given)
        plan = str(perfuse.explain(fn, *given).stage("plan"))
        target = Context.default().target
    is_read = fn is after and not target.has_bf16_pairs  # int8 itself, by dot products
    is_known = rows <= 4 or is_amd_avx512(target)
    is_known |= dtype == F32 and is_intel_with_pairs(target)
    assert ("prologue" in plan) == (is_known and not is_read), plan


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("fn", "rows", "dtype"),
    [(int4, 1, BF16), (int4, 3, F32), (high_first, 2, BF16), (signed, 4, BF16),
     (signed, 1, torch.float16), (by_channel, 1, F32), (int4, 60, BF16)],
)  # fmt: skip
def test_halves_of_bytes_are_unpacked_inside_the_matmul(
    fn: Callable[..., Tensor], rows: int, dtype: torch.dtype, isa: str
) -> None:
    """Groups of 25 pairs: neither whole vectors nor an even number of them."""
    x, _, s, z = operands(rows, dtype)
    given = (x, torch.randint(0, 256, (N, K // 2), dtype=torch.uint8), s, z)
    with perfuse.config.patch({"cpu.simd": isa, "verify": "memory"}):
        check(fn, given)
        plan = str(perfuse.explain(fn, *given).stage("plan"))
    is_inside, is_stored = "prologue" in plan, "[2*x1 + 1] = " in plan
    assert is_inside != is_stored and is_inside == (rows <= 4), plan


def test_packed_weights_that_are_read_elsewhere_are_stored() -> None:
    def both(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.stack([w & 15, w >> 4], -1)
        wide = (pairs.view(N, -1, GROUP).to(x.dtype) * s[..., None]).view(N, K)
        return linear(x, wide), pairs

    x, _, s, z = operands(1, F32)
    w = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
    (got, pairs), (eager, held) = compiled(both)(x, w, s, z), both(x, w, s, z)
    assert_as_good_as_eager(got, eager, both(x.double(), w, s.double(), z)[0])
    assert torch.equal(pairs, held)


def test_the_weight_is_read_as_it_is_at_the_call() -> None:
    """Scales change between calls, and after their use in one."""

    def step(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
        result = grouped(x, w, s, z)
        s.mul_(2)
        return result

    x, w, s, z = operands(1, F32)
    call, before = compiled(step), s.clone()
    exact = grouped(x.double(), w, before.double(), z)
    for times in (1, 2):
        got = call(x, w, s, z)
        assert_as_good_as_eager(got, grouped(x, w, before * times, z), exact * times)
        assert torch.equal(s, before * 2 * times)


def test_infinities_and_nan_of_a_scale_reach_their_columns_alone() -> None:
    x, w, s, z = operands(2, BF16)
    s[3, 0], s[7, 9] = torch.nan, torch.inf
    got, eager = compiled(grouped)(x, w, s, z), grouped(x, w, s, z)
    assert torch.equal(got.isfinite(), eager.isfinite()) and not got[:, [3, 7]].isfinite().any()


@pytest.mark.parametrize("fn", [grouped, int4])
def test_a_race_judges_the_kernel_that_dequantises(fn: Callable[..., Tensor]) -> None:
    x, w, s, z = operands(2, F32)
    given = (x, w if fn is grouped else w[:, : K // 2].contiguous().view(torch.uint8), s, z)
    with perfuse.config.patch({"max_autotune_gemm": True}), fresh_cache():
        check(fn, given)
        decisions = str(perfuse.explain(fn, *given).stage("decisions"))
    assert "dots" in decisions and "error" not in decisions.split("dots")[1][:80]
