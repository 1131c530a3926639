"""Tiles raced on the device: every rival is measured or refused, and the program carries that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

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


class Kept:
    """A remote cache in this process."""

    documents: ClassVar[dict[str, str]] = {}
    num_get: ClassVar[int] = 0
    num_put: ClassVar[int] = 0

    def __init__(self, key: str, is_autotune: bool = False) -> None:
        assert is_autotune

    def get(self, filename: str) -> Any:
        found = self.documents.get(filename)
        Kept.num_get += found is not None
        return None if found is None else json.loads(found)

    def put(self, filename: str, data: Any) -> None:
        self.documents[filename] = json.dumps(data)
        Kept.num_put += 1


def test_tiles_are_shared_and_pinned(device: str, tmp_path: Path) -> None:
    """One put and a get for each later compile; then a lock file gives the same without a race."""
    if device != "cuda":
        pytest.skip("the CPU has no tiles")
    x = torch.randn(4096, 2048, device=device)
    shared = {"autotune_local_cache": False, "autotune_remote_cache": True}
    lock = str(tmp_path / "perfuse.lock")
    chosen = []
    with patch("perfuse.cache.RedisRemoteCacheBackend", Kept), perfuse.config.patch(shared):
        for _ in range(4):
            torch._dynamo.reset()
            candidate = torch.compile(softmax, backend="perfuse", mode="max-autotune")
            with fresh_cache():
                explained = perfuse.explain(candidate, x)
            chosen.append(explained.graphs[0].decisions[0].chosen)
    assert (Kept.num_get, Kept.num_put) == (3, 1) and len(set(chosen)) == 1
    perfuse.write_lock(lock, explained)
    torch._dynamo.reset()
    before = counters["autotune.kernels_measured"]
    with fresh_cache(), perfuse.config.patch(lock_file=lock):
        pinned = perfuse.explain(torch.compile(softmax, backend="perfuse"), x)
    assert [d.chosen for d in pinned.graphs[0].decisions] == chosen[:1]
    assert counters["autotune.kernels_measured"] == before
