"""Max-autotune on the device: workers, selected sources, precompilation, remembered choices."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from perfuse import config
from perfuse.autotune import AlgorithmSelector
from perfuse.autotune.device_kind import device_kind
from perfuse.autotune.known_choices import H200
from perfuse.counters import counters
from perfuse.target import device_target
from perfuse.testing import fresh_cache, run_and_get_code


@pytest.fixture(autouse=True)
def fresh(device: str) -> Iterator[None]:
    if device != "cuda":
        pytest.skip("the CPU has tests of its own")
    torch._dynamo.reset()
    with fresh_cache():
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def sum_of_two(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return a @ b + c @ d


def of_sine(a: Tensor, b: Tensor) -> Tensor:
    return torch.sin(a) @ b


def chain(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a = (a @ b) @ c
    a, b, c = (t.to(torch.float16) for t in (a, b, c))
    return (a @ b) @ c


def compiled(fn: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="perfuse", **how)


@pytest.mark.parametrize(
    ("autotune_in_subproc", "autotune_multi_device"),
    list(itertools.product((True, False), repeat=2)),
)
def test_sum_of_two_matmuls(autotune_in_subproc: bool, autotune_multi_device: bool) -> None:
    given = randn(2048, 64), randn(64, 1536), randn(2048, 64), randn(64, 1536)
    with config.patch(
        max_autotune=True,
        autotune_in_subproc=autotune_in_subproc,
        autotune_multi_device=autotune_multi_device,
    ):
        got = compiled(sum_of_two)(*given)
    torch.testing.assert_close(got, sum_of_two(*given), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rows", [100, 0])
def test_matmul_in_workers(rows: int, dynamic: bool) -> None:
    a, b = randn(rows, 10), randn(10, 100)
    with config.patch(max_autotune=True, autotune_in_subproc=True):
        got = compiled(of_sine, dynamic=dynamic)(a, b)
    torch.testing.assert_close(got, of_sine(a, b), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rows", [100, 0])
def test_addmm_in_workers(rows: int, dynamic: bool) -> None:
    x, a, b = randn(100), randn(rows, 10), randn(10, 100)
    with config.patch(max_autotune=True, autotune_in_subproc=True):
        got = compiled(torch.addmm, dynamic=dynamic)(x, a, b)
    torch.testing.assert_close(got, torch.addmm(x, a, b), atol=1e-3, rtol=1e-3)


def test_epilogue_of_dynamic_size_by_triton_alone() -> None:
    def fn(x: Tensor, w: Tensor, bias: Tensor, factor: Tensor) -> Tensor:
        return F.relu(x.transpose(0, 1) @ w.transpose(0, 1) + bias) * factor

    w, bias = (randn(*shape, dtype=torch.half) for shape in ((3, 4), (3,)))
    with config.patch(
        max_autotune=True, autotune_in_subproc=True, max_autotune_gemm_backends="Triton"
    ):
        candidate = compiled(fn, fullgraph=True, dynamic=True)
        for rows in (5, 8):
            x, factor = randn(4, rows, dtype=torch.half), randn(rows, 3, dtype=torch.half)
            expected = fn(x, w, bias, factor)
            torch.testing.assert_close(candidate(x, w, bias, factor), expected)


def test_triton_alone_calls_no_library() -> None:
    a, b = (randn(256, 256, dtype=torch.bfloat16) for _ in range(2))
    with config.patch(max_autotune=True, max_autotune_gemm_backends="TRITON"):
        got, code = run_and_get_code(compiled(torch.mm), a, b)
    assert "aten.mm" not in code[-1] and "tl.dot" in code[0]
    torch.testing.assert_close(got, a @ b, atol=1e-1, rtol=1e-2)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("size", [16, 64])
def test_infinite_times_are_an_error(size: int, is_fused: bool) -> None:
    lookup = AlgorithmSelector.lookup

    def infinite(self: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
        return dict.fromkeys(lookup(self, *args, **kwargs), float("inf"))

    a = torch.zeros(size, size, device="cuda")
    with (
        patch.object(AlgorithmSelector, "lookup", infinite),
        config.patch(
            max_autotune=True,
            max_autotune_gemm_backends="TRITON",
            autotune_fallback_to_aten=False,
            benchmark_epilogue_fusion=is_fused,
        ),
        pytest.raises(BackendCompilerFailed, match="NoValidChoicesError"),
    ):
        compiled(lambda a, b: a.matmul(b))(a, a)


@pytest.mark.parametrize("backends", ["TRITON", "CPP"])
def test_a_small_matmul_without_a_candidate_is_an_error(backends: str) -> None:
    """A generated loop stands in for the library call, which is not selected."""
    a = torch.zeros(2, 2, device="cuda")
    strict = {"max_autotune_gemm_backends": backends, "autotune_fallback_to_aten": False}
    with (
        config.patch(max_autotune=True, **strict),
        pytest.raises(BackendCompilerFailed, match="NoValidChoicesError"),
    ):
        compiled(lambda a, b: a.matmul(b))(a, a)


class SharedCache:
    """A remote cache in this process that counts what is found and what is put."""

    documents: ClassVar[dict[str, str]] = {}
    counted: ClassVar[list[int]] = [0, 0]

    def __init__(self, key: str, is_autotune: bool = False) -> None:
        assert is_autotune

    def get(self, filename: str) -> Any:
        found = self.documents.get(filename)
        self.counted[0] += found is not None
        return None if found is None else json.loads(found)

    def put(self, filename: str, data: Any) -> None:
        self.documents[filename] = json.dumps(data)
        self.counted[1] += 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("is_matmul", [True, False])
def test_one_put_and_a_get_for_each_later_compile(is_matmul: bool, dynamic: bool) -> None:
    """Of a matmul in max-autotune, and of a kernel in default mode."""
    given = (randn(100, 10), randn(10, 100)) if is_matmul else (randn(100, 100), randn(100, 100))
    shared = {"autotune_local_cache": False, "autotune_remote_cache": True}
    SharedCache.documents.clear()
    SharedCache.counted[:] = [0, 0]
    with (
        patch("perfuse.cache.RedisRemoteCacheBackend", SharedCache),
        config.patch(max_autotune=is_matmul, **shared),
    ):
        for _ in range(4):
            with fresh_cache():
                compiled(of_sine if is_matmul else torch.add, dynamic=dynamic)(*given)
            torch._dynamo.reset()
    assert SharedCache.counted == [3, 1]


def test_candidates_are_compiled_once_and_not_where_the_choice_is_known() -> None:
    given = tuple(torch.rand(256, 256, device="cuda") for _ in range(3))
    expected = chain(*given)
    before = counters["autotune.candidates_compiled"]
    got = compiled(chain, mode="max-autotune-no-cudagraphs")(*given)
    assert counters["autotune.candidates_compiled"] > before
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)
    torch._dynamo.reset()
    before = counters["autotune.candidates_compiled"]
    compiled(chain, mode="max-autotune-no-cudagraphs")(*given)
    assert counters["autotune.candidates_compiled"] == before


def test_remembered_choices_are_searched_without_tuning() -> None:
    given = tuple(torch.rand(256, 256, device="cuda") for _ in range(3))
    before = counters["autotune.candidates_compiled"]
    with config.patch(search_autotune_cache=True):
        got = compiled(chain)(*given)
    torch.testing.assert_close(got, chain(*given), atol=1e-2, rtol=1e-2)
    assert counters["autotune.candidates_compiled"] == before


def test_dropout_of_a_matmul() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        F.dropout(a @ b, 0.1).sum().backward()
        assert a.grad is not None
        return a.grad

    a, b = randn(128, 128).requires_grad_(), randn(128, 128)
    torch.manual_seed(1)
    expected = fn(a, b).clone()
    a.grad = None
    with config.patch(benchmark_kernel=True, fallback_random=True, max_autotune_gemm=True):
        torch.manual_seed(1)
        got = compiled(fn)(a, b)
    torch.testing.assert_close(got, expected, atol=1e-1, rtol=1e-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_a_convolution_of_one_point_by_triton_alone(dtype: torch.dtype) -> None:
    last = torch.channels_last
    conv = torch.nn.Conv2d(3, 16, 1).cuda().to(dtype).to(memory_format=last)
    x = randn(4, 3, 32, 32, dtype=dtype).contiguous(memory_format=last)
    settings = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    with config.patch(settings), torch.no_grad():
        got, code = run_and_get_code(compiled(lambda mod, x: mod(x)), conv, x)
    assert "convolution" not in code[-1] and "tl.dot" in code[0]
    torch.testing.assert_close(got, conv(x), atol=1e-2, rtol=1e-2)


def is_h200() -> bool:
    settings = config.snapshot()
    return device_kind(device_target(settings, torch.device("cuda", 0))) == H200


def test_known_templates_in_default_mode() -> None:
    """A sum of two matmuls in float32 is no less exact than eager's, infinities included."""
    if not is_h200():
        pytest.skip("the classes were measured on an H200")
    given = randn(2048, 64), randn(64, 1536), randn(2048, 64), randn(64, 1536)
    got, code = run_and_get_code(compiled(sum_of_two), *given)
    assert "bf16x6" in code[0] and "aten.mm" not in code[-1]
    exact = sum_of_two(*(t.double() for t in given))
    errors = [float((r - exact).square().mean()) for r in (got, sum_of_two(*given))]
    assert errors[0] <= errors[1]
    given[0][3, 4], given[2][5, 6] = float("inf"), float("nan")
    torch.testing.assert_close(
        compiled(sum_of_two)(*given), sum_of_two(*given), equal_nan=True, atol=1e-3, rtol=1e-3
    )
    x, w = randn(1, 14336, dtype=torch.bfloat16), randn(4096, 14336, dtype=torch.bfloat16)
    got, code = run_and_get_code(compiled(lambda x, w: x @ w.t()), x, w)
    assert "aten.mm" not in code[-1]
    torch.testing.assert_close(got, x @ w.t(), atol=1.0, rtol=2e-2)
