"""Tiles raced on the device: every rival is measured or refused, and the program carries that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import perfuse
from perfuse.autotune.tiles import tile_of
from perfuse.counters import counters
from perfuse.testing import fresh_cache
from tests.harness.compare import assert_as_good_as_eager


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x * 2, -1)


def test_tiles_are_raced_once(device: str) -> None:
    if device != "cuda":
        pytest.skip("the CPU has no tiles")
    x = torch.randn(4096, 2048, device=device)
    candidate = torch.compile(softmax, backend="perfuse", mode="max-autotune")
    with fresh_cache():
        first, before = perfuse.explain(candidate, x), counters["autotune.cache_hit"]
        again = perfuse.explain(candidate, x)
        got = candidate(x).clone()
    (decision,) = first.graphs[0].decisions
    assert again.graphs[0].decisions == (decision,)
    assert counters["autotune.cache_hit"] > before
    default, *others = decision.rivals
    assert default.median_us and default.spread_us is not None and others
    assert all((rival.median_us is None) == bool(rival.refusal) for rival in others)
    assert tile_of(decision.chosen) in [tile_of(rival.choice) for rival in decision.rivals]
    assert "Measured: 1 choice" in str(first)
    assert_as_good_as_eager(got, softmax(x), softmax(x.double()))
