"""Convolutions on a CPU that are loops or matmuls: depthwise, over patches, of one point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse
from tests.harness.compare import assert_as_good_as_eager

LAST, FIRST = torch.channels_last, torch.contiguous_format
Case = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]


def depthwise(stride: int = 1, padding: int = 1, dilation: int = 1) -> Callable[..., Tensor]:
    def run(x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        given = bias[0] if bias else None
        return F.conv2d(x, w, given, stride, padding, dilation, w.shape[0]).relu()

    return run


def patches(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(x, w, b, stride=(w.shape[2], w.shape[3])).relu()


def points(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(x, w, b).relu()


CASES: dict[str, Case] = {
    "3x3": (depthwise(), ((2, 20, 9, 7), (20, 1, 3, 3), (20,))),
    "3x3, whole vectors": (depthwise(), ((2, 32, 3, 4), (32, 1, 3, 3))),
    "3x3, stride 2": (depthwise(2), ((2, 20, 9, 7), (20, 1, 3, 3))),
    "3x3, dilated": (depthwise(1, 2, 2), ((1, 20, 9, 9), (20, 1, 3, 3))),
    "5x5, stride 2": (depthwise(2, 2), ((2, 17, 8, 8), (17, 1, 5, 5), (17,))),
    "7x7": (depthwise(1, 3), ((2, 20, 9, 6), (20, 1, 7, 7), (20,))),
    "7x7, few pixels": (depthwise(1, 3), ((2, 20, 2, 2), (20, 1, 7, 7))),
    "7x7, dilated": (depthwise(1, 6, 2), ((1, 20, 9, 9), (20, 1, 7, 7))),
    "many terms": (depthwise(), ((3, 8, 24, 24), (8, 1, 3, 3))),
    "patches": (patches, ((2, 5, 8, 6), (7, 5, 4, 2), (7,))),
    "one patch": (patches, ((2, 5, 4, 4), (7, 5, 4, 4), (7,))),
    "patches and a rest": (patches, ((2, 5, 9, 8), (7, 5, 4, 4), (7,))),
    "points": (points, ((2, 5, 4, 3), (7, 5, 1, 1), (7,))),
}


@pytest.mark.parametrize("layout", [FIRST, LAST], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("name", CASES)
def test_as_eager_with_gradients(name: str, layout: torch.memory_format) -> None:
    function, shapes = CASES[name]
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in shapes]
    given[0] = given[0].to(memory_format=layout)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="perfuse")
    weights = torch.randn(function(*given).shape)
    got, eager = (_results(run, given, weights) for run in (compiled, function))
    exact = _results(function, [t.double() for t in given], weights.double())
    for a, b in zip(got, eager, strict=True):
        steps = zip(a.shape, a.stride(), b.stride(), strict=True)
        assert all(n == 1 or p == q for n, p, q in steps)
    assert_as_good_as_eager(got, eager, exact)


def _results(run: Any, given: list[Tensor], weights: Tensor) -> list[Tensor]:
    own = [t.detach().clone().requires_grad_(True) for t in given]
    out = run(*own)
    (out * weights).sum().backward()
    return [out.detach(), *(t.grad for t in own if t.grad is not None)]


@pytest.mark.parametrize("name", ["3x3", "patches", "points"])
def test_no_library_convolution(name: str) -> None:
    function, shapes = CASES[name]
    given = [torch.randn(shape) for shape in shapes]
    given[0] = given[0].to(memory_format=LAST).requires_grad_(True)
    report = perfuse.explain(function, *(t.requires_grad_(True) for t in given))
    assert not [name for name in report.counters if "fallback" in name and "convolution" in name]


def test_pools_keep_the_layout_of_their_input() -> None:
    """Values that several windows read are computed once, in the order in which they walk."""

    def pooled(x: Tensor) -> Tensor:
        return F.max_pool2d(x.exp(), 3, 2, 1) + F.avg_pool2d(x.exp() * 2, 3, 2, 1)

    x = torch.randn(2, 20, 8, 6).to(memory_format=LAST)
    with torch.no_grad():
        plan = perfuse.explain(pooled, x).stage("plan")
        got, eager = torch.compile(pooled, backend="perfuse")(x), pooled(x)
    assert_as_good_as_eager(got, eager, pooled(x.double()))
    kernels = [line for line in plan.splitlines() if line.startswith("k")]
    assert any("<20):" in line for line in kernels), plan
    assert not any("<3):" in line for line in kernels), plan
