"""One compiled function called from many threads at once: each call has memory of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

import perfuse


def block(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, dim=-1) @ w.t() + x


def test_calls_from_many_threads_do_not_meet() -> None:
    torch._dynamo.reset()
    w = torch.randn(64, 96)
    fast = perfuse.compile(block)
    with torch.no_grad():
        fast(torch.randn(32, 64), w)

    def call(seed: int) -> float:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = block(x, w)
            return max(float((fast(x, w) - expected).abs().max()) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        worst = max(pool.map(call, range(32)))
    assert worst < 1e-4
