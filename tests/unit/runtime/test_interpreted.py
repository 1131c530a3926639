"""The host half of the GPU path, end to end, through Triton's interpreter on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import perfuse
from perfuse.codegen.triton.sources import Launch, TritonKernel, TritonSources
from perfuse.codegen.triton.unit import generate_triton
from perfuse.counters import counters
from perfuse.graph.aligned_matmul import aligned_matmul
from perfuse.ir.dtype import DType
from perfuse.schedule.plan import Plan
from perfuse.schedule.turns import Scratch
from perfuse.testing import fresh_cache, rand_strided, run_and_get_code
from perfuse.torch_compat.registration import reset_dynamo
from tests.harness import plain_triton
from tests.harness.compare import assert_as_good_as_eager

# Matmuls as library calls, however small.
SETTINGS = {"gpu.interpret": True, "verify": True, "thresholds.gpu_loop_matmul_work": 0}
GENERATOR = "perfuse.backends.gpu.generate_triton"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(GENERATOR, plain_triton.generate_triton)
    reset_dynamo()
    with fresh_cache(), perfuse.config.patch(SETTINGS):
        yield


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend="perfuse", fullgraph=True, **options)


def mixed(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.exp(x) * 2 + y
    return z.sum(1), (z @ z.t()).relu() + 1


def test_kernels_and_calls() -> None:
    x, y = torch.randn(6, 7), torch.randn(7)
    got, (module, host) = run_and_get_code(compiled(mixed), x, y)
    torch.testing.assert_close(got, mixed(x, y))
    assert "@triton.jit" in module
    assert "launch(F[1], stream)" in host


def test_products_that_fill_windows_of_a_result() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product: torch.Tensor = aligned_matmul(x + 1, w.t())
        return product, product.sum(1)

    x, w = torch.randn(19, 16).bfloat16(), torch.randn(1025, 16).bfloat16()
    got, (_, host) = run_and_get_code(compiled(fn), x, w)
    assert host.count("out=as_strided(") == 8
    wide = [y.double() for y in (x + 1, w)]
    exact = wide[0] @ wide[1].t()
    assert_as_good_as_eager(got, fn(x, w), (exact, exact.sum(1)))


def test_sizes_that_change_are_one_compile() -> None:
    fn = compiled(mixed, dynamic=True)
    before = counters.snapshot().get("capture.traced", 0)
    for rows in (5, 6, 9, 33):
        x, y = torch.randn(rows, 7), torch.randn(7)
        torch.testing.assert_close(fn(x, y), mixed(x, y))
    assert counters.snapshot()["capture.traced"] == before + 1


def test_training() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.exp(x @ w).sum()

    x, w = torch.randn(4, 5), torch.randn(5, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(fn(x, w), w)
    (got,) = torch.autograd.grad(compiled(fn)(x, w), w)
    torch.testing.assert_close(got, expected)


def test_an_input_is_written_in_place() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    x = torch.randn(40)
    expected = x + 1
    got = compiled(fn)(x)
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(got, expected * 2)


def test_arguments_that_lie_astray_are_copied_and_written_back() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(3)
        return x + y

    run = compiled(fn)
    for start in (0, 1):  # compiled for an aligned window, called with one that is not
        memory = torch.randn(51)
        y = torch.randn(30)
        x = memory[start : start + 30]
        before = memory.clone()
        got = run(x, y)
        torch.testing.assert_close(x, before[start : start + 30] * 3)
        torch.testing.assert_close(got, x + y)
        torch.testing.assert_close(memory[start + 30 :], before[start + 30 :])


def test_an_example_astray_promises_nothing() -> None:
    x = torch.randn(33)[1:]
    got, (_, host) = run_and_get_code(compiled(lambda x: x + 1), x)
    torch.testing.assert_close(got, x + 1)
    assert "realigned" not in host


def test_strides_with_gaps() -> None:
    x = rand_strided((5, 6), (14, 2))
    torch.testing.assert_close(compiled(lambda x: torch.exp(x).sum(0))(x), torch.exp(x).sum(0))


def test_a_second_process_would_load_it() -> None:
    x, y = torch.randn(6, 7), torch.randn(7)
    compiled(mixed)(x, y)
    reset_dynamo()
    before = counters.snapshot().get("capture.cache_hit", 0)
    torch.testing.assert_close(compiled(mixed)(x, y), mixed(x, y))
    assert counters.snapshot()["capture.cache_hit"] == before + 1


def test_memory_that_dies_in_a_segment_is_used_again() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.exp(x / x.sum(0)) + x.sum(1, keepdim=True)
            x = x.t().contiguous()
        return x.relu()

    x = torch.rand(8, 8)
    with perfuse.config.patch({"thresholds.gpu_arena_tensor_bytes": 0}):
        got, (_, host) = run_and_get_code(compiled(fn), x)
    torch.testing.assert_close(got, fn(x))
    assert any(line.strip().startswith("P[") and "= P[" in line for line in host.splitlines())


def three_steps(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.exp(x) @ w).relu() + 1


def test_small_temporaries_cost_no_allocation() -> None:
    x, y, w = torch.rand(3, 6, 6)
    fn = compiled(three_steps)
    with torch.inference_mode():  # the frame of later calls is not made there for good
        fn(x, w)
    first, (_, host) = run_and_get_code(fn, x, w)
    second = fn(y, w)
    torch.testing.assert_close(first, three_steps(x, w))
    torch.testing.assert_close(second, three_steps(y, w))
    assert host.count("empty(") == 1 and "out=T[" in host


def test_calls_that_overlap_have_an_arena_each() -> None:
    fn = compiled(three_steps)
    inputs = [torch.rand(6, 6) for _ in range(4)]
    w = torch.rand(6, 6)
    fn(inputs[0], w)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: fn(x, w), inputs * 3))
    for got, x in zip(results, inputs * 3, strict=True):
        torch.testing.assert_close(got, three_steps(x, w))


def test_an_artefact_holds_its_kernels(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU())
    x = torch.randn(3, 7)
    path = perfuse.aot_compile(module, (x,), tmp_path / "made")
    with perfuse.config.patch({"gpu.interpret": False}):
        torch.testing.assert_close(perfuse.load(path)(x), module(x))
    assert (path / "0-bundle.json").exists()


def test_a_gradient_that_does_not_come_is_zeros() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.exp(x), x * 3

    x = torch.randn(6, requires_grad=True)
    _, second = compiled(fn)(x)
    (got,) = torch.autograd.grad(second.sum(), x)
    torch.testing.assert_close(got, torch.full((6,), 3.0))


def test_compiling_after_interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GENERATOR, generate_triton)
    x = torch.randn(6, 7)
    torch.testing.assert_close(compiled(lambda x: x.sum(1))(x), x.sum(1))
    with perfuse.config.patch({"gpu.interpret": False}):
        made = perfuse.codegen_for(lambda x: x.exp().sum(1), (x,), target="cuda:90")
    assert made.objects


COUNTING = """
import triton
import triton.language as tl

@triton.jit
def total(x, out, so_far, done, n: tl.constexpr, BLOCK: tl.constexpr):
  at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
  tl.atomic_add(so_far, tl.sum(tl.load(x + at, at < n, 0.0), 0))
  if tl.atomic_add(done, 1) == tl.num_programs(0) - 1:
    tl.store(out, tl.load(so_far) * 2)
    tl.store(done, 0)
"""


def counting(plan: Plan, context: Any, writers: Any) -> TritonSources:
    """Twice the sum, taken by the last block to finish: needs a fill, and a counter that stays."""
    (step,) = plan.kernels
    (out,) = step.stored
    signature = (("x", "*fp32"), ("out", "*fp32"), ("so_far", "*fp32"), ("done", "*i32"))
    constants = (("n", 100), ("BLOCK", 32))
    kernel = TritonKernel("total", signature, constants, frozenset({"x"}), 4, 1)
    done = Scratch("done", DType.I32, 1, 0, is_kept=True)
    so_far = Scratch("so_far", DType.F32, 1, 0.0)
    buffers = ("i0", out, "so_far", "done")
    launch = Launch("total", buffers, (), (4, 1, 1), (so_far, done))
    return TritonSources(COUNTING, (kernel,), ((launch,),))


def test_fills_and_memory_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GENERATOR, counting)
    run = compiled(lambda x: x.sum())
    for _ in range(3):
        x = torch.randn(100)
        torch.testing.assert_close(run(x), 2 * x.sum())


def test_a_broken_promise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def promising(plan: Plan, context: Any, writers: Any) -> TritonSources:
        made = plain_triton.generate_triton(plan, context)
        (kernel,) = made.kernels
        promised = frozenset(name for name, _ in kernel.signature)
        kernel = TritonKernel(kernel.name, kernel.signature, (), promised, 4, 1)
        return TritonSources(made.text, (kernel,), made.launches)

    monkeypatch.setattr(GENERATOR, promising)
    with pytest.raises(ValueError, match="promised to be divisible by 16"):
        compiled(lambda x: x + 1, dynamic=True)(torch.randn(7))
