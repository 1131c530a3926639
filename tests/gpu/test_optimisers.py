"""Compiled optimiser steps on the GPU: eager's results, from few launches, recorded or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import perfuse  # noqa: F401  (a checkout that is not installed makes itself known)
from tests.harness.compare import assert_as_good_as_eager
from tests.harness.devices import gpu_device

SIZES = (64, 1, 5000, 17, 1024, 2049, 300, 70_000)
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {}),
    ("AdamW", {"capturable": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("Adam", {"amsgrad": True}),
    ("NAdam", {}),
)


def parameters(dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for k in range(40):
        start, slope = (torch.randn(SIZES[k % len(SIZES)], generator=generator) for _ in range(2))
        parameter = torch.nn.Parameter(start.to(device, dtype))
        parameter.grad = slope.to(device, dtype)
        found.append(parameter)
    return found


def after_steps(
    name: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    mode: str | None,
    backend: str = "perfuse",
) -> list[Tensor]:
    params = parameters(dtype, gpu_device())
    optimiser = getattr(torch.optim, name)(params, **options)
    step = optimiser.step
    if mode is not None:
        torch._dynamo.reset()
        settings = {"mode": mode} if mode else {}
        step = torch.compile(optimiser.step, backend=backend, **settings)
    for _ in range(4):
        step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("mode", ("", "reduce-overhead"))
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_step_matches_eager(name: str, options: dict[str, Any], mode: str) -> None:
    if gpu_device() == "cpu" and options.get("capturable"):
        pytest.skip("capturable is for GPUs")
    got = after_steps(name, options, torch.float32, mode)
    # Eager steps correct their bias in Python, in double; captured ones on tensors, in float32.
    eager = after_steps(name, options, torch.float32, "", "eager")
    assert_as_good_as_eager(got, eager, after_steps(name, options, torch.float64, None))
