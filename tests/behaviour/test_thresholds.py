"""Small tensors with every size threshold at 0: what large ones take is taken by all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse
from perfuse.config import ThresholdSettings
from perfuse.runtime.pool import POOL
from perfuse.testing import fresh_cache
from tests.behaviour import test_capture, test_found_bugs
from tests.behaviour.row import Behaviour, randn

# Every threshold at 0, non-temporal stores for all outputs, threads for every kernel.
ALL_AT_ZERO: dict[str, Any] = {
    **{f"thresholds.{field.name}": 0 for field in dataclasses.fields(ThresholdSettings)},
    "cpu.grain_elements": 0,
    "cpu.stream_store_bytes": 1,
}


@pytest.fixture(autouse=True)
def all_at_zero() -> Iterator[None]:
    with fresh_cache(), perfuse.config.patch(ALL_AT_ZERO):
        yield


def block(x: Tensor, w: Tensor) -> Tensor:
    y = F.layer_norm(torch.relu(x @ w) @ w.t(), (16,))
    return y.softmax(-1) @ y.t() + y.sum(1)


OWN = [
    Behaviour("block", block, lambda: [randn(16, 16, grad=True), randn(16, 16, grad=True)]),
    Behaviour("one_element", lambda x: x * 2 + 1, lambda: [randn(1, grad=True)]),
    Behaviour("no_element", lambda x: (x + 1, x.sum()), lambda: [randn(0, 3)]),
    Behaviour("odd_rows", lambda x: (x.exp(), x.cumsum(1), x.t() + 1), lambda: [randn(7, 13)]),
    Behaviour("dynamic", lambda x: x.exp().sum(0) + x, lambda: [randn(5, 3)], dynamic=True),
]
SAMPLED = [
    *test_capture.MUTATION[::4],
    *test_capture.ALIASING[::4],
    *test_capture.LAYOUTS[::4],
    *test_found_bugs.ROWS[::6],
]


@pytest.mark.parametrize("row", [*OWN, *SAMPLED], ids=str)
def test_matches_eager(row: Behaviour) -> None:
    row.check()


@pytest.mark.parametrize("row", OWN, ids=str)
def test_matches_eager_on_an_interpreted_gpu(row: Behaviour) -> None:
    with perfuse.config.patch({"gpu.interpret": True}):
        row.check()


def test_small_results_are_pooled() -> None:
    torch._dynamo.reset()
    function = torch.compile(lambda x: x + 1, backend="perfuse")
    function(randn(3))  # an arena too is pooled
    before = POOL.used_bytes
    made = function(randn(3))
    assert POOL.used_bytes == before + made.nbytes
    assert made.resize_(2, 2).shape == (2, 2)


def test_pooled_results_can_be_changed_as_any_tensor() -> None:
    torch._dynamo.reset()
    function = torch.compile(lambda x: x + 1, backend="perfuse")
    weight = torch.ones(3, requires_grad=True)
    function(randn(3)).add_(weight).sum().backward()
    assert weight.grad is not None and weight.grad.eq(1).all()
    made = function(randn(3))
    made.untyped_storage().resize_(0)
    assert made.untyped_storage().nbytes() == 0
    torch.testing.assert_close(function(randn(3)), randn(3) + 1)
