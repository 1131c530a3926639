"""The most memory that a call holds, against eager: classes of programs at sizes drawn by seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perfuse import config
from perfuse.runtime.pool import release_memory
from perfuse.schedule import schedule
from perfuse.testing import peak_memory

SLACK = 1 << 13  # statistics of rows, indices, alignment


def mixed_tokens(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Complex values, which programs carry, are freed after their last use."""
    for _ in range(4):
        x = F.layer_norm(torch.fft.fft2(x, dim=(1, 2)).real + x, x.shape[-1:], w[0], w[1])
    return x


def head(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, w, b)
    return F.cross_entropy(logits.flatten(0, 1), logits.flatten(0, 1).argmax(-1)), logits


def blocks(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    for _ in range(3):
        x = x + F.linear(F.gelu(F.linear(x, w, b)), w.t())
    return x


CLASSES: list[Callable[..., Any]] = [mixed_tokens, head, blocks]


@pytest.mark.parametrize("fn", CLASSES)
@pytest.mark.parametrize("seed", range(2))
def test_a_forward_holds_no_more_than_eager(fn: Callable[..., Any], seed: int) -> None:
    rng = random.Random(seed)
    batch, length, width, inner = (
        rng.randint(*r) for r in ((1, 4), (20, 90), (50, 150), (300, 900))
    )
    args = torch.randn(batch, length, width), torch.randn(inner, width), torch.randn(inner)
    compiled = torch.compile(fn, backend="perfuse")
    with torch.no_grad():
        compiled(*args)
        release_memory()
        kept: list[Any] = []
        ours = peak_memory(lambda: kept.append(compiled(*args)))
        eager = peak_memory(lambda: kept.append(fn(*args)))
    assert ours <= eager + SLACK


@pytest.mark.parametrize("seed", range(2))
def test_large_gradients_of_small_operands_come_last(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wide head on few rows, after layers on many: its gradient is not held meanwhile."""
    rng = random.Random(seed)
    rows, width, classes = rng.randint(300, 600), rng.randint(40, 90), rng.randint(900, 1800)
    body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
    last, x = nn.Linear(width, classes), torch.randn(2, rows, width)

    def peak() -> int:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: last(body(x).mean(1)), backend="perfuse")

        def run() -> None:
            compiled(x).sum().backward()
            body.zero_grad()
            last.zero_grad()

        with config.patch({"cpu.tune_matmuls": False, "cache.enabled": False}):
            run()
        release_memory()
        return peak_memory(run)

    ours = peak()
    monkeypatch.setattr(schedule, "late_results", lambda fuser, program, order: order)
    # Half of that gradient at least, or of the values beside which it would be held.
    assert ours <= peak() - min(classes, rows) * width * 4 // 2
