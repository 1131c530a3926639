"""Casts to and from FP8: bit for bit as in eager, for every code and every half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import perfuse
from perfuse import config
from perfuse.target import machine_isas
from perfuse.testing import fresh_cache
from tests.harness.backend import compiled
from tests.harness.float8 import (
    CAST_NAMES,
    E4M3,
    E5M2,
    FLOAT8,
    assert_same_bits,
    every_code,
    narrowed,
    round_trips,
    wide_inputs,
    widened,
)

REFUSAL = "Conversions between float8_e5m2 and float8_e4m3fn is not supported!"


def all_casts(wide: Any, codes: Any) -> tuple[list[Tensor], ...]:
    return narrowed(wide), round_trips(wide), widened(codes)


@pytest.fixture(autouse=True)
def new_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_every_cast_has_eagers_bits(isa: str) -> None:
    if isa not in machine_isas():
        pytest.skip(f"this CPU has no {isa}")
    given = wide_inputs(), {dtype: every_code(dtype) for dtype in FLOAT8}
    with fresh_cache(), config.patch({"cpu.simd": isa, "cpu.opt_level": 1}):
        got = compiled(all_casts)(*given)
    for mine, theirs in zip(got, all_casts(*given), strict=True):
        assert_same_bits(mine, theirs, CAST_NAMES)


def test_casts_are_loops_of_ours() -> None:
    given = {dtype: every_code(dtype) for dtype in FLOAT8}
    (graph,) = perfuse.explain(widened, given).graphs
    assert not graph.fallbacks


def cross_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


@pytest.mark.parametrize(("source", "result"), [(E4M3, E5M2), (E5M2, E4M3)], ids=str)
def test_between_e4m3_and_e5m2(source: torch.dtype, result: torch.dtype) -> None:
    """Refused, unless a setting asks for it."""
    x = every_code(source)
    for dynamic in (False, True):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=REFUSAL) as raised:
            compiled(cross_cast, dynamic=dynamic)(x, result)
        assert "fp8_cross_cast" in str(raised.value)
    with config.patch(fp8_cross_cast=True):
        assert_same_bits(compiled(cross_cast)(x, result), x.to(result))


def through_float(x: Tensor) -> Tensor:
    return x.float().to(E5M2)


def into_buffer(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=E5M2).copy_(x)


def test_a_cast_through_float32_is_written_out() -> None:
    x = every_code(E4M3)
    assert_same_bits(compiled(through_float)(x), through_float(x))


def test_a_copy_converts_too() -> None:
    x = every_code(E4M3)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=REFUSAL):
        compiled(into_buffer)(x)
    with config.patch(fp8_cross_cast=True):
        assert_same_bits(compiled(into_buffer)(x), into_buffer(x))


@pytest.mark.filterwarnings("ignore:Perfuse could not compile")
def test_a_refused_cast_may_run_eagerly() -> None:
    x = every_code(E4M3)
    with config.patch(on_error="eager"):
        assert_same_bits(compiled(cross_cast)(x, E5M2), x.to(E5M2))


@pytest.mark.parametrize("fn", [lambda x: x.to(E4M3), lambda x: x.to(E5M2).float()])
def test_gradients_go_through_casts(fn: Callable[[Tensor], Tensor]) -> None:
    """As in eager: to the cast's argument, in its own dtype."""
    given = torch.randn(37, generator=torch.Generator().manual_seed(0))
    results = []
    for function in (fn, compiled(fn)):
        x = given.clone().requires_grad_()
        y = function(x)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        results.append((y.detach(), grad))
    assert_same_bits(results[1], results[0])
