"""Explanations of values that are not plain tensors: every graph that runs can be explained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import perfuse

SQUARE = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: torch.fft.fft(x).abs().cumsum(0), "aten._fft_r2c"),
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) * 2, "cond"),
    ],
    ids=["complex", "cond"],
)
def test_opaque_values_are_printed(function: Callable[[Tensor], Any], named: str) -> None:
    with perfuse.testing.fresh_cache():
        assert named in str(perfuse.explain(function, SQUARE))


def test_what_computed_the_arguments_is_not_run_backward() -> None:
    first, second, calls = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), []
    hidden = first(SQUARE).sin()
    assert hidden.grad_fn is not None
    hidden.grad_fn.register_hook(lambda *_: calls.append(1))
    assert len(perfuse.explain(second, hidden).graphs) == 2  # forward and backward
    assert not calls
    second(hidden).sum().backward()
    assert calls


def test_a_weight_that_computed_the_arguments_too() -> None:
    layer = torch.nn.Linear(4, 4)
    hidden = layer(SQUARE).sin()
    perfuse.explain(layer, hidden)
    layer(hidden).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_arguments_buffers_and_random_numbers_stay_as_they_were(mode: Callable[[], Any]) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            return torch.nn.functional.dropout(self.norm(x), 0.5)

    with mode():
        model, x = Counting(), torch.ones(4, 4)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        random = torch.get_rng_state()
        perfuse.explain(model, x)
        assert torch.equal(x, torch.ones(4, 4))
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        assert torch.equal(torch.get_rng_state(), random)


class Growing(torch.nn.Module):
    """A cache of positions that a call replaces by a longer one, and notes the length of."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("positions", torch.arange(2.0))
        self.length = 2
        self.last: Tensor | None = None

    def encode(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.length:
            self.positions, self.length = torch.arange(float(x.shape[0])), x.shape[0]
        self.last = self.norm(x) + self.positions[: x.shape[0], None]
        return self.last

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


@pytest.mark.parametrize(
    "function_of",
    [lambda m: m, lambda m: m.encode, lambda m: lambda x: m(x) * 2],
    ids=["module", "method", "closure"],
)
def test_modules_stay_as_they_were(function_of: Callable[[Growing], Any]) -> None:
    model = Growing()
    state = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    perfuse.explain(function_of(model), SQUARE)
    assert model.length == 2 and model.last is None
    for name, buffer in model.named_buffers():
        tensor, value = state[name]
        assert buffer is tensor and torch.equal(buffer, value)
    assert model(torch.ones(6, 4)).shape == (6, 4)


def test_a_step_that_runs_its_own_backward() -> None:
    layer = torch.nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        loss = layer(x).square().mean()
        loss.backward()
        return loss

    assert len(perfuse.explain(step, SQUARE).graphs) == 2


def test_repeated_elements_outside_of_autograd() -> None:
    with torch.inference_mode():
        x = torch.ones(4, 1).expand(4, 3)
        perfuse.explain(torch.sin, x)
        assert torch.equal(x, torch.ones(4, 3))
