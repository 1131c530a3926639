"""Floats of eight bits on a GPU: casts, quantisers and scaled matmuls against eager there."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from perfuse import config
from perfuse.testing import do_bench_using_profiling
from tests.behaviour.test_float8_programs import DELAYED, DTYPES, all_delayed
from tests.harness.backend import compiled
from tests.harness.devices import all_onto
from tests.harness.float8 import (
    CAST_NAMES,
    E4M3,
    E5M2,
    FLOAT8,
    QUANTISERS,
    SCALED_MATMULS,
    Quantiser,
    ScaledMatmul,
    assert_same_bits,
    check_quantised,
    check_random_weight,
    every_code,
    narrowed,
    norm_filled_amax,
    round_trips,
    saturated,
    wide_inputs,
    widened,
    with_random_weight,
)

REFUSAL = "Conversions between float8_e5m2 and float8_e4m3fn is not supported!"


@pytest.fixture(autouse=True)
def new_dynamo() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.mark.parametrize("casts", [narrowed, round_trips], ids=lambda f: f.__name__)
def test_casts_of_wide_floats(casts: Any, device: str) -> None:
    wide = {dtype: x.to(device) for dtype, x in wide_inputs().items()}
    assert_same_bits(compiled(casts)(wide), casts(wide), CAST_NAMES)


def test_casts_of_every_code(device: str) -> None:
    codes = {dtype: every_code(dtype).to(device) for dtype in FLOAT8}
    assert_same_bits(compiled(widened)(codes), widened(codes), CAST_NAMES)


@pytest.mark.parametrize(("source", "result"), [(E4M3, E5M2), (E5M2, E4M3)], ids=str)
def test_between_e4m3_and_e5m2(source: torch.dtype, result: torch.dtype, device: str) -> None:
    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    x = every_code(source).to(device)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=REFUSAL):
        compiled(cast, dynamic=True)(x, result)
    with config.patch(fp8_cross_cast=True):
        assert_same_bits(compiled(cast, dynamic=True)(x, result), x.to(result))


@pytest.mark.parametrize("row", QUANTISERS, ids=str)
def test_quantisers(row: Quantiser, device: str) -> None:
    mine, theirs = (all_onto(row.inputs(), device) for _ in range(2))
    got = compiled(row.function)(*mine)
    check_quantised(row, got, row.function(*theirs), mine, theirs)


@pytest.mark.parametrize("shape", [(16, 16, 16), (4, 2048, 4096)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saturated(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    fn = compiled(saturated, dynamic=True)
    for source in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(shape, device=device, dtype=source) * 400
        assert_same_bits(fn(x, dtype), saturated(x, dtype))


@pytest.mark.parametrize("shape", [(1, 10, 15), (1, 10, 4096), (4, 2048, 4096)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_delayed_scaling(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    x, scale = torch.rand(shape, device=device).half(), torch.tensor(0.2, device=device)
    mine, theirs = (torch.zeros(len(DELAYED), dtype=torch.half, device=device) for _ in range(2))
    got = compiled(all_delayed)(x, scale, mine, dtype)
    for a, b in zip(got, all_delayed(x, scale, theirs, dtype), strict=True):
        torch.testing.assert_close(a.half(), b.half(), rtol=1e-1, atol=1e-1)
    torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


def test_profiled_time(device: str) -> None:
    x, scale = torch.rand(4, 2048, 4096, device=device).half(), torch.tensor(0.2, device=device)
    call = functools.partial(compiled(norm_filled_amax), x, scale, torch.zeros(1).half().to(device))
    call()
    assert do_bench_using_profiling(call, warmup=5, rep=20) > 0


@pytest.mark.parametrize("row", SCALED_MATMULS, ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_scaled_matmul(row: ScaledMatmul, dynamic: bool, device: str) -> None:
    fn = compiled(row.function, dynamic=dynamic)
    for num_rows in (16, 32) if dynamic else (16,):
        given = row.inputs(num_rows, device)
        torch.testing.assert_close(fn(*given), row.function(*given), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_random_weight(dtype: torch.dtype, device: str) -> None:
    check_random_weight(device, dtype, compiled(with_random_weight, dynamic=True))
