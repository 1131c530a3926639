"""Quantising to FP8: scales are powers of two, nothing overflows, rounding happens once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perfuse.precision.quantise import (
    E4M3,
    E5M2,
    LARGEST,
    Scaled,
    delayed_scale,
    dequantised_blocks,
    quantise,
    quantise_blocks,
    quantise_rows,
    quantise_tensor,
    scale_for,
    with_amax,
)

# Bits behind the leading one, and the exponent of the least normal number.
FORMATS = {E4M3: (3, -6), E5M2: (2, -14)}


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 numbers within range, rounded to the nearest of a format, ties to even."""
    bits, least = FORMATS[dtype]
    exponent = torch.frexp(x).exponent - 1
    unit = torch.exp2((exponent.clamp(min=least) - bits).double())
    return torch.round(x / unit) * unit


def samples() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(64, 256) * torch.exp2(torch.randint(-20, 20, (64, 1)).float())
    x[3] = 0
    x[5, 1:] = 0
    return x


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_scales_are_the_least_powers_of_two_that_fit(dtype: torch.dtype) -> None:
    amax = torch.cat([samples().abs().flatten(), torch.exp2(torch.arange(-30.0, 30.0))])
    amax = amax[amax > 1e-9]
    scale = scale_for(amax, dtype)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    # One rounding of float32 above the limit may still get the smaller scale: it saturates.
    assert bool((amax <= scale * LARGEST[dtype] * (1 + 2**-21)).all())
    assert bool((amax > scale / 2 * LARGEST[dtype] * (1 - 2**-21)).all())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("way", [quantise_tensor, quantise_rows], ids=lambda f: f.__name__)
def test_values_are_rounded_once(way: object, dtype: torch.dtype) -> None:
    assert callable(way)
    x = samples()
    made: Scaled = way(x, dtype)
    exact = rounded(x.double() / made.scale.double(), dtype)
    assert torch.equal(made.values.double(), exact.clamp(-LARGEST[dtype], LARGEST[dtype]))


def test_blocks_have_their_own_scales() -> None:
    x = samples()[:, :128].repeat(4, 2)
    x[:128, 128:] *= 1024
    made = quantise_blocks(x, E4M3, 128, 128)
    assert made.scale.shape == (2, 1, 2, 1)
    assert float(made.scale[0, 0, 1, 0]) == 1024 * float(made.scale[0, 0, 0, 0])
    first = quantise_tensor(x[:128, :128], E4M3)
    assert torch.equal(made.values[:128, :128].float(), first.values.float())
    lines = quantise_blocks(x, E4M3, 1, 128)
    assert lines.scale.shape == (256, 1, 2, 1)
    for dtype in (torch.bfloat16, torch.float32):
        wide = dequantised_blocks(lines, dtype).double()
        scales = lines.scale.squeeze().double().repeat_interleave(128, 1)
        assert torch.equal(wide, lines.values.double() * scales)


def test_what_is_not_finite_stays_visible() -> None:
    for special in (torch.nan, torch.inf):
        x = torch.ones(2, 16)
        x[0, 3] = special
        made = quantise_rows(x, E4M3)
        back = made.values.float() * made.scale
        assert bool(back[0].isnan().any()) and torch.equal(back[1], x[1])


def test_delayed_scales_follow_the_history() -> None:
    history = torch.tensor([1.0, 7.0, 3.0, 0.0])
    expected = scale_for(torch.tensor(7.0), E4M3)
    assert torch.equal(delayed_scale(torch.tensor(2.0), history, E4M3), expected)


@pytest.mark.parametrize("amax", [7.1, 1000.0])
def test_an_overflow_falls_back_to_this_step(amax: float) -> None:
    """7.0 fits a scale of 1/64 exactly, so that anything above it overflows."""
    now, history = torch.tensor(amax), torch.tensor([7.0, 1.0])
    scale = delayed_scale(now, history, E4M3)
    assert torch.equal(scale, scale_for(now, E4M3))
    x = torch.tensor([[amax, -amax / 2]])
    assert bool((quantise(x, scale, E4M3).values.float().abs() <= 448).all())
    assert torch.allclose(quantise(x, scale, E4M3).values.float() * scale, x, rtol=2**-4)


def test_the_first_step_has_no_history() -> None:
    now = torch.tensor(3.0)
    assert torch.equal(delayed_scale(now, torch.zeros(4), E5M2), scale_for(now, E5M2))


def test_a_history_forgets_and_ignores_what_is_not_finite() -> None:
    history = with_amax(torch.tensor([3.0, 2.0, 1.0]), torch.tensor(4.0))
    assert history.tolist() == [4.0, 3.0, 2.0]
    assert with_amax(history, torch.tensor(torch.inf)).tolist() == [0.0, 4.0, 3.0]
