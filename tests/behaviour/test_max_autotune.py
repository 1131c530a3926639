"""Max-autotune through its public names: choices, requests, workers, errors; no GPU needed."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import multiprocessing as mp
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.proxy_tensor import make_fx

import perfuse
from perfuse import config
from perfuse.autotune import (
    CUDA_VISIBLE_DEVICES,
    AlgorithmSelector,
    ChoiceCaller,
    NoValidChoicesError,
    TuningProcessPool,
)
from perfuse.ir import Buffer, FixedLayout, GraphLowering
from perfuse.kernels import aten_mm_plus_mm
from perfuse.testing import do_bench_using_profiling, fresh_cache
from tests.behaviour.choices import AlwaysFails, DeviceChoice, DeviceRequest, measure
from tests.harness.compare import assert_as_good_as_eager

CPU = torch.device("cpu")
SHAPES = ((2, 3), (3, 2), (2, 3), (3, 2))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with fresh_cache():
        yield


def buffers() -> tuple[Buffer, ...]:
    return tuple(
        Buffer(f"m{i}", FixedLayout(CPU, torch.float32, shape)) for i, shape in enumerate(SHAPES)
    )


def measured_in_child(choice: ChoiceCaller) -> tuple[int, torch.Tensor, torch.Tensor, Any]:
    """The child's exit status, the times it wrote, its result and its inputs."""
    layout = FixedLayout(CPU, torch.float32, (2, 2))
    inputs = [AlgorithmSelector.benchmark_example_value(node) for node in buffers()]
    out = AlgorithmSelector.benchmark_example_value(layout)
    out.zero_()
    times = torch.zeros(3)
    child = mp.get_context("spawn").Process(target=measure, args=(choice, inputs, out, times))
    child.start()
    child.join()
    return child.exitcode, times, out, inputs


def test_a_choice_is_measured_in_a_child_process() -> None:
    with GraphLowering(make_fx(lambda: torch.zeros(2, 3))()):
        choice = aten_mm_plus_mm.bind(buffers(), FixedLayout(CPU, torch.float32, (2, 2)))
        status, times, out, (a, b, c, d) = measured_in_child(choice)
    assert status == 0
    assert bool((times > 0).all())
    torch.testing.assert_close(out, a @ b + c @ d)


def test_a_choice_that_fails_ends_the_child_process() -> None:
    status, times, _, _ = measured_in_child(AlwaysFails("fails", [], None))
    assert status != 0
    assert not times.any()


class Recording(ChoiceCaller):
    """Remembers the thread that compiled it."""

    def __init__(self, key: str | None = None) -> None:
        super().__init__("recording", [], Mock())
        self.key = key
        self.threads: list[int] = []

    def precompile(self) -> None:
        self.threads.append(threading.get_ident())

    def hash_key(self) -> Any:
        return self.key


def test_choices_are_compiled_in_other_threads() -> None:
    choices = [Recording() for _ in range(10)]
    selector = AlgorithmSelector()
    perfuse.counters.clear()
    with (
        patch.object(
            selector, "make_benchmark_fn", return_value=lambda _: dict.fromkeys(choices, 1)
        ),
        config.patch({"autotune_in_subproc": False, "compile_threads": len(choices)}),
    ):
        assert selector("a test", choices, [], Mock()) is choices[0]
    assert all(len(choice.threads) == 1 for choice in choices)
    assert threading.get_ident() not in {choice.threads[0] for choice in choices}
    assert perfuse.counters["autotune.candidates_compiled"] == 10


def test_equal_kernels_are_compiled_once() -> None:
    choices = [Recording("one"), Recording("one"), Recording("another")]
    perfuse.counters.clear()
    times = patch.object(AlgorithmSelector, "make_benchmark_fn", lambda *_: lambda c: {c[2]: 1.0})
    with times:
        assert AlgorithmSelector()("a test", choices, [], Mock()) is choices[2]
    assert sum(len(choice.threads) for choice in choices) == 2
    assert perfuse.counters["autotune.candidates_compiled"] == 2


def test_a_failure_in_a_worker_is_an_infinite_time() -> None:
    choice = DeviceChoice(DeviceRequest(3.14, "elsewhere"))
    with config.patch({"autotune_multi_device": False}):
        pool = TuningProcessPool()
        pool.initialize()
        assert pool.benchmark([choice]) == {choice: math.inf}
        assert "AssertionError" in pool.reasons[choice]
        choice.bmreq = DeviceRequest(3.14, os.environ.get(CUDA_VISIBLE_DEVICES))
        assert pool.benchmark([choice]) == {choice: 3.14}
        assert not pool.reasons
        pool.terminate()


def test_workers_of_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA_VISIBLE_DEVICES, "0,1,4")
    choices = [DeviceChoice(DeviceRequest(value, "0,1,4")) for value in (3.14, 2.718)]
    with config.patch({"autotune_multi_device": True}):
        pool = TuningProcessPool()
        pool.initialize()
        assert pool.benchmark(choices) == {c: c.bmreq.value for c in choices}
        pool.terminate()


ONLY = {"max_autotune": True, "autotune_fallback_to_aten": False, "thresholds.tuned_matmul_work": 0}


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.matmul(b)


@pytest.mark.parametrize("in_subproc", [False, True])
def test_no_valid_choice_is_the_compilers_error(in_subproc: bool) -> None:
    a = torch.zeros(2, 2)
    chosen = {"max_autotune_gemm_backends": "TRITON", "autotune_in_subproc": in_subproc}
    with config.patch({**ONLY, **chosen}), pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(matmul, backend="perfuse")(a, a)
    assert "NoValidChoicesError" in str(raised.value)
    assert "TRITON: not on cpu" in str(raised.value)


@pytest.mark.parametrize("with_epilogue", [True, False])
def test_infinite_times_are_the_same_error(with_epilogue: bool) -> None:
    a, lookup = torch.zeros(16, 16), AlgorithmSelector.lookup

    def infinite(self: AlgorithmSelector, *args: Any, **kwargs: Any) -> dict[Any, float]:
        return dict.fromkeys(lookup(self, *args, **kwargs), math.inf)

    with (
        patch.object(AlgorithmSelector, "lookup", infinite),
        config.patch({**ONLY, "benchmark_epilogue_fusion": with_epilogue}),
        pytest.raises(BackendCompilerFailed) as raised,
    ):
        torch.compile(matmul, backend="perfuse")(a, a)
    assert "NoValidChoicesError" in str(raised.value)
    assert "aten.mm.out: its time is infinite" in str(raised.value)


def test_a_selector_without_a_finite_time_raises() -> None:
    with pytest.raises(NoValidChoicesError, match="fails"):
        layout = FixedLayout(CPU, torch.float32, (2, 2))
        AlgorithmSelector()("a test", [AlwaysFails("fails", [], None)], [], layout)


@pytest.mark.parametrize("in_subproc", [False, True])
@pytest.mark.parametrize("shapes", [((100, 10), (10, 100)), ((0, 10), (10, 100))], ids=str)
def test_matmuls_are_right_however_they_are_tuned(in_subproc: bool, shapes: Any) -> None:
    a, b = (torch.randn(shape) for shape in shapes)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.sin(a) @ b

    with config.patch({**ONLY, "autotune_in_subproc": in_subproc}):
        got = torch.compile(fn, backend="perfuse")(a, b)
    assert_as_good_as_eager(got, fn(a, b), fn(a.double(), b.double()))


def test_matmul_with_dropout_while_kernels_are_timed() -> None:
    a = torch.randn(64, 64, requires_grad=True)
    b = torch.randn(64, 64)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(a @ b, 0.1).sum()

    settings = {"benchmark_kernel": True, "fallback_random": True, "max_autotune_gemm": True}
    with config.patch(settings):
        gradients = []
        for function in (fn, torch.compile(fn, backend="perfuse")):
            torch.manual_seed(0)
            a.grad = None
            function(a, b).backward()
            gradients.append(a.grad)
    torch.testing.assert_close(*gradients)


def test_the_size_of_a_fusion_is_limited() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.softmax(-1)
        return (y * 2).softmax(-1)

    x = torch.randn(16, 33)
    counts = []
    for size in (0, 2):
        with config.patch({"max_fusion_size": size}):
            explained = perfuse.explain(fn, x)
            (graph,) = explained.graphs
            counts.append(len(graph.kernels))
            torch._dynamo.reset()
            got = torch.compile(fn, backend="perfuse")(x)
            assert_as_good_as_eager(got, fn(x), fn(x.double()))
    assert counts[0] < counts[1]


def test_profiled_time_is_that_of_the_work() -> None:
    small, large = torch.randn(8, 8), torch.randn(256, 256)
    assert do_bench_using_profiling(lambda: small @ small, 1, 5) > 0
    assert do_bench_using_profiling(lambda: large @ large, 1, 20) > 0.05
