"""CUDA graphs on a device: recorded, replayed, and never in the way of what the user holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import perfuse
from perfuse.counters import counters

MODE = "reduce-overhead"


@pytest.fixture(autouse=True)
def cuda(device: str) -> Iterator[None]:
    if device != "cuda":
        pytest.skip("CUDA graphs are a GPU's")
    torch._dynamo.reset()
    torch.manual_seed(0)
    counters.clear()
    yield
    torch.cuda.synchronize()


def counted(prefix: str) -> dict[str, int]:
    return {n: c for n, c in counters.snapshot().items() if n.startswith(f"cudagraph.{prefix}")}


def block(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(nn.functional.layer_norm(x @ w, w.shape[-1:]), -1)


def test_inference_is_recorded_once_and_replayed() -> None:
    fn = perfuse.compile(block, mode=MODE)
    w = torch.randn(64, 64, device="cuda")
    kept = []
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(32, 64, device="cuda")
            kept.append((fn(x, w), block(x, w)))
    for got, expected in kept:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert counted("recorded") == {"cudagraph.recorded": 1}
    assert not counted("refused")


def test_a_capture_of_another_mode_is_loaded_and_replayed() -> None:
    """Modes share the cache: what "default" compiled is recorded by the mode that loads it."""
    x, w = torch.randn(32, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    with perfuse.testing.fresh_cache(), torch.no_grad():
        for mode, num_recorded in (("default", 0), (MODE, 1), ("default", 0)):
            torch._dynamo.reset()
            recorded = counters["cudagraph.recorded"]
            fn = perfuse.compile(block, mode=mode, dynamic=False)
            for _ in range(4):
                torch.testing.assert_close(fn(x, w), block(x, w), rtol=1e-4, atol=1e-5)
            assert counters["cudagraph.recorded"] - recorded == num_recorded
    assert counters["capture.traced"] == 1 and counters["capture.cache_hit"] == 2


def test_state_is_changed_in_place() -> None:
    def step(x: Tensor, state: Tensor) -> Tensor:
        state.mul_(0.5).add_(x)
        return state.sum()

    fn = perfuse.compile(step, mode=MODE)
    state, expected = torch.zeros(100, device="cuda"), torch.zeros(100, device="cuda")
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(100, device="cuda")
            got, wanted = fn(x, state), step(x, expected)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(state, expected)
    assert counted("recorded") == {"cudagraph.recorded": 1}


def train(model: nn.Module, run: Any, num_steps: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator("cuda").manual_seed(1)
    losses = []
    for _ in range(num_steps):
        x = torch.randn(16, 32, device="cuda", generator=generator)
        loss = run(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


def test_training_is_that_of_eager() -> None:
    def made() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)
        ).cuda()

    eager, compiled = made(), made()
    expected = train(eager, eager, 8)
    got = train(compiled, perfuse.compile(compiled, mode=MODE), 8)
    torch.testing.assert_close(torch.stack(got), torch.stack(expected), rtol=1e-3, atol=1e-4)
    assert counted("recorded")["cudagraph.recorded"] >= 2, counted("")


def test_sizes_are_recorded_apart() -> None:
    fn = perfuse.compile(lambda x: (x.exp().sum(-1), x * 2), mode=MODE, dynamic=True)
    with torch.no_grad():
        for _ in range(4):
            for rows in (3, 5, 7):
                x = torch.randn(rows, 40, device="cuda")
                total, double = fn(x)
                torch.testing.assert_close(total, x.exp().sum(-1), rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(double, x * 2)
    assert counted("recorded") == {"cudagraph.recorded": 3}


def test_random_numbers_differ_between_replays() -> None:
    fn = perfuse.compile(lambda x: torch.rand_like(x) + x, mode=MODE)
    x = torch.zeros(1000, device="cuda")
    with torch.no_grad():
        results = [fn(x) for _ in range(5)]
    assert len({float(r.sum()) for r in results}) == 5
    assert counted("recorded") == {"cudagraph.recorded": 1}


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_reasons_are_counted() -> None:
    fn = perfuse.compile(lambda x: x.nonzero() + 1, mode=MODE)
    x = torch.tensor([0.0, 1.0, 2.0], device="cuda")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fn(x), x.nonzero() + 1)
    assert not counted("recorded")
