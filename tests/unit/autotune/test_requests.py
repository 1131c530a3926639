"""Requests: operands by description, programs that are loaded from the store, here or elsewhere."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import perfuse
from perfuse.autotune import wire
from perfuse.autotune.outcome import Fate
from perfuse.autotune.pool import TuningProcessPool
from perfuse.autotune.program_request import ProgramRequest, changed_settings
from perfuse.candidates.request import BenchmarkRequest, RandomTensor
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.testing import fresh_cache
from tests.unit.graph.tracing import traced
from tests.unit.planning import plan_of


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with fresh_cache():
        yield


OPERANDS = [
    RandomTensor((3, 4), (4, 1), torch.float32),
    RandomTensor((3, 4), (1, 5), torch.bfloat16, seed=3),
    RandomTensor((2, 0, 3), (0, 3, 1), torch.float32),
    RandomTensor((), (), torch.float64),
    RandomTensor((5,), (2,), torch.int8),
    RandomTensor((5, 5), (0, 1), torch.bool),
]


@pytest.mark.parametrize("operand", OPERANDS, ids=str)
def test_an_operand_is_the_same_wherever_it_is_made(operand: RandomTensor) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    made = operand.tensor()
    again = wire.value_of(wire.document_of(operand)).tensor()
    assert (made.shape, made.stride(), made.dtype) == (
        operand.shape,
        operand.strides,
        operand.dtype,
    )
    assert torch.equal(made, again)
    assert torch.equal(torch.get_rng_state(), before)


def request() -> tuple[ProgramRequest, Any]:
    context = Context.default()
    module = traced(lambda x, y: (x * 2 + y,), torch.ones(8, 16), torch.ones(16))
    plan = plan_of(module, context)
    return ProgramRequest.of(plan, context=context), plan


def test_a_program_is_loaded_and_measured() -> None:
    made, _ = request()
    again = wire.value_of(wire.document_of(made))
    inputs = tuple(operand.tensor() for operand in made.operands)
    x, y = sorted(inputs, key=torch.Tensor.dim, reverse=True)
    torch.testing.assert_close(again.loaded(inputs, None)(), x * 2 + y)
    assert again.benchmark() > 0


def test_a_worker_finds_the_program_in_the_store() -> None:
    made, _ = request()
    pool = TuningProcessPool(Settings())
    found, missing = pool.run([made, elsewhere(made)])
    pool.terminate()
    assert found.fate is Fate.MEASURED and found.value > 0
    assert missing.fate is Fate.RAISED and "not in the store" in missing.detail


@pytest.mark.parametrize(
    "cache", [{"cache.enabled": False}, {"cache.dir": "/proc/nowhere"}], ids=str
)
def test_a_program_that_no_disk_keeps_travels_with_its_libraries(cache: dict[str, Any]) -> None:
    with perfuse.config.patch(cache), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that there is no cache
        made, _ = request()
        assert made.benchmark() > 0
    pool = TuningProcessPool(Settings())
    (outcome,) = pool.run([made])
    pool.terminate()
    assert outcome.fate is Fate.MEASURED and outcome.value > 0


def elsewhere(made: ProgramRequest) -> ProgramRequest:
    settings = {**made.settings, "cache.dir": made.settings["cache.dir"] + "-empty"}
    return ProgramRequest(made.program, made.operands, made.device, settings)


def test_settings_travel_as_what_is_not_the_default() -> None:
    with perfuse.config.patch({"cpu.opt_level": 1, "cache.dir": "/tmp/x"}):
        settings = perfuse.config.snapshot()
    changed = changed_settings(settings)
    assert changed["cpu.opt_level"] == 1 and "cpu.simd" not in changed
    assert replace(settings, verify=False) == replace(
        Settings().with_overrides(changed), verify=False
    )


def test_a_request_says_how_it_is_measured() -> None:
    with pytest.raises(NotImplementedError, match="neither benchmark nor loaded"):
        BenchmarkRequest().benchmark()


def test_kernels_are_timed_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(64, 64)
    perfuse.counters.clear()
    with (
        caplog.at_level(logging.INFO, "perfuse.tuning"),
        perfuse.config.patch({"benchmark_kernel": True}),
    ):
        got = torch.compile(lambda x: x.softmax(-1) @ x, backend="perfuse")(x)
    torch.testing.assert_close(got, x.softmax(-1) @ x)
    assert perfuse.counters["autotune.kernels_timed"] == 1
    assert "kernel k0: " in caplog.text and "GB/s" in caplog.text


@pytest.mark.parametrize(
    "function",
    [lambda x: x.add_(1), lambda x: (x, torch.arange(64).flip(0))],
    ids=["write", "make"],
)
def test_kernels_without_results_or_without_inputs_are_timed(function: Callable[..., Any]) -> None:
    perfuse.counters.clear()
    torch.compile(function, backend="perfuse", options={"benchmark_kernel": True})(torch.zeros(64))
    assert perfuse.counters["autotune.kernels_timed"] == 1
