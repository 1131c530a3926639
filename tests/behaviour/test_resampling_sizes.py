"""Resampling to sizes that are symbolic, and of empty batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse  # noqa: F401


def _both(f: Callable[..., Tensor], *shapes: tuple[int, ...], dynamic: bool) -> None:
    torch._dynamo.reset()
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    results = []
    for function in (f, torch.compile(f, backend="perfuse", dynamic=dynamic, fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = function(*leaves)
        y.square().sum().backward()
        results.append((y.detach(), leaves[0].grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_the_size_of_another_tensor(mode: str) -> None:
    def like(x: Tensor, skip: Tensor) -> Tensor:
        return F.interpolate(x, size=skip.shape[-2:], mode=mode) * skip

    _both(like, (2, 3, 4, 5), (2, 3, 9, 11), dynamic=True)


def test_factors_that_are_computed_again() -> None:
    def scaled(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=(2.0, 1.5), recompute_scale_factor=True)

    _both(scaled, (2, 3, 4, 6), dynamic=True)


def test_an_empty_batch() -> None:
    _both(lambda x: F.interpolate(x, scale_factor=2), (0, 3, 4, 5), dynamic=False)
