"""Programs that users write with FP8: casts, delayed scaling, scaled matmuls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from perfuse.ir.program import Matmul
from perfuse.testing import do_bench_using_profiling
from tests.harness.backend import compiled
from tests.harness.float8 import (
    E4M3,
    E5M2,
    SCALED_MATMULS,
    ScaledMatmul,
    amax_alone,
    check_random_weight,
    cpu_takes_row_scales,
    halves,
    norm_copied_amax,
    norm_filled_amax,
    saturated,
    with_amax,
    with_random_weight,
)
from tests.unit.planning import gpu_context, plans_of

DTYPES = (E4M3, E5M2)
SM_90 = gpu_context("sm_90")


@pytest.fixture(autouse=True)
def new_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_there_and_back(dtype: torch.dtype) -> None:
    def cast(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(E4M3).to(dtype), x.to(E5M2).to(dtype)

    x = torch.rand(15, 3, 13).to(dtype)
    for got, eager in zip(compiled(cast, dynamic=True)(x), cast(x), strict=True):
        torch.testing.assert_close(got, x, rtol=0.5, atol=0.5)
        assert torch.equal(got, eager)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saturated(dtype: torch.dtype) -> None:
    """A dtype as an argument, and sizes that are not known."""
    fn = compiled(saturated, dynamic=True)
    for source in (torch.float16, torch.bfloat16, torch.float32):
        x = halves(16, 16, 16, dtype=source) * 400
        assert torch.equal(fn(x, dtype).view(torch.uint8), saturated(x, dtype).view(torch.uint8))


Program = Callable[..., Tensor]
DELAYED: dict[str, Program] = {
    "amax": lambda x, scale, amax, dtype: amax_alone(x, scale, dtype),
    "amax in a buffer": with_amax,
    "layer norm": norm_filled_amax,
    "layer norm, maximum kept": functools.partial(norm_filled_amax, keepdim=True),
    "layer norm, maximum copied": norm_copied_amax,
}


def all_delayed(x: Tensor, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return [p(x, scale, amax[i : i + 1], dtype) for i, p in enumerate(DELAYED.values())]


@pytest.mark.parametrize("shape", [(1, 1, 15), (1, 10, 15), (1, 10, 512), (1, 3, 4096)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_delayed_scaling(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Bit for bit; a layer norm, whose sums have another order, may give the next code."""
    generator = torch.Generator().manual_seed(0)
    x, scale = torch.rand(shape, generator=generator).half(), torch.tensor(0.2)
    mine, theirs = (torch.zeros(len(DELAYED), dtype=torch.half) for _ in range(2))
    got = compiled(all_delayed)(x, scale, mine, dtype)
    eager = all_delayed(x, scale, theirs, dtype)
    for name, a, b in zip(DELAYED, got, eager, strict=True):
        assert a.dtype == b.dtype
        if not name.startswith("layer norm"):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
            continue
        steps = (a.view(torch.uint8).int() - b.view(torch.uint8).int()).abs()
        assert int(steps.max()) <= 1 and int(steps.sum()) <= max(1, a.numel() // 1000), name
    torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


def test_profiled_time() -> None:
    x, scale, amax = torch.rand(4, 32, 256).half(), torch.tensor(0.2), torch.zeros(1).half()
    fn = compiled(norm_filled_amax)
    for function in (fn, norm_filled_amax):
        call = functools.partial(function, x, scale, amax, E4M3)
        call()
        assert do_bench_using_profiling(call, warmup=1, rep=5) > 0


@pytest.mark.parametrize("row", SCALED_MATMULS, ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_scaled_matmul(row: ScaledMatmul, dynamic: bool) -> None:
    """Operands that the program makes keep the layout that the library asks for."""
    if row.is_by_row and not cpu_takes_row_scales():
        pytest.skip("eager has no scales of rows on a CPU")
    fn = compiled(row.function, dynamic=dynamic)
    for num_rows in (16, 32) if dynamic else (16,):
        given: list[Any] = row.inputs(num_rows)
        torch.testing.assert_close(fn(*given), row.function(*given), rtol=0, atol=0)


@pytest.mark.parametrize("row", SCALED_MATMULS, ids=str)
def test_second_operands_are_column_major(row: ScaledMatmul) -> None:
    """The CPU takes any layout, the GPU's library only this one."""
    mode = FakeTensorMode()  # nothing is multiplied
    given = [None if x is None else mode.from_tensor(x) for x in row.inputs()]
    (plan,) = plans_of(row.function, *given, context=SM_90)
    calls = [step for step in plan.steps if isinstance(step, Matmul) and "scaled_mm" in step.op]
    assert calls
    for call in calls:
        first, second = call.args[:2]
        assert first.strides[1] == 1, str(plan)
        assert second.strides[0] == 1, str(plan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_random_weight(dtype: torch.dtype) -> None:
    check_random_weight("cpu", dtype, compiled(with_random_weight, dynamic=True))
