"""Compiled optimiser steps: one graph, eager's results, a few kernels over all parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import perfuse
from perfuse.testing import fresh_cache
from tests.harness.backend import Counting
from tests.harness.compare import assert_as_good_as_eager

STEPS = 3
SHAPES = ((64,), (8, 16), (300,), (), (1,), (5000,), (3, 1, 7), (0,), (70,), (2, 1025))
FEW_SHAPES = ((300,), (), (3, 1, 7), (0,), (2, 1025))


@dataclass(frozen=True)
class Case:
    """An optimiser and how it is made."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])

    def make(self, params: list[Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, self.name)(params, **self.options)
        return made


CASES = (
    Case("AdamW"),
    Case("AdamW", {"foreach": True, "amsgrad": True, "maximize": True}),
    Case("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    Case("Adam", {"lr": torch.tensor(0.01)}),
    Case("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    Case("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    Case("RMSprop", {"centered": True, "momentum": 0.5, "foreach": True}),
    Case("Adagrad", {"foreach": True}),
    Case("NAdam", {"foreach": True}),
    Case("RAdam"),
    Case("Adamax", {"foreach": True}),
    Case("Adadelta", {"foreach": True}),
    Case("ASGD", {"foreach": True}),
    Case("Rprop", {"foreach": True}),
)


def parameters(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in shapes:
        start = torch.randn(shape, generator=generator)
        slope = torch.randn(shape, generator=generator)
        parameter = torch.nn.Parameter(start.to(dtype))
        parameter.grad = slope.to(dtype)
        found.append(parameter)
    return found


def after_steps(case: Case, params: list[Tensor], backend: Any = None) -> list[Tensor]:
    optimiser = case.make(params)
    optimiser.step()  # makes the state: a graph of its own where it is compiled
    step: Callable[[], Any] = optimiser.step
    if backend is not None:
        torch._dynamo.reset()
        step = torch.compile(optimiser.step, backend=backend)
    for _ in range(STEPS):
        step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_matches_eager(case: Case) -> None:
    counting = Counting("perfuse")
    # All shapes for one optimiser, listed or not; the others differ in what they compute.
    shapes = SHAPES if case.name == "AdamW" else FEW_SHAPES
    with fresh_cache(), perfuse.config.patch({"verify": "memory"}):
        got = after_steps(case, parameters(shapes, torch.float32), counting)
    # Eager steps correct their bias in Python, in double; captured ones on tensors, in float32.
    eager = after_steps(case, parameters(shapes, torch.float32), "eager")
    exact = after_steps(case, parameters(shapes, torch.float64))
    assert counting.num_graphs == 1
    assert_as_good_as_eager(got, eager, exact)


# -- kernels ---------------------------------------------------------------------------------

MIXED = ((64,), (17,), (8, 16), (300,), (1024,), (5, 3), (4096,), (130,), (33, 65), (2000,))


def lion(params: list[Tensor], momenta: list[Tensor], lr: float = 1e-2) -> None:
    """Lion, written with ops over lists."""
    grads = [p.grad for p in params if p.grad is not None]
    update = torch._foreach_lerp(grads, momenta, 0.9)
    torch._foreach_mul_(params, 1 - lr * 0.1)
    torch._foreach_add_(params, torch._foreach_sign(update), alpha=-lr)
    torch._foreach_lerp_(momenta, grads, 0.01)


def counted(step: Callable[[], Any]) -> tuple[int, int]:
    """Kernels and ATen calls of a compiled step."""
    torch._dynamo.reset()
    with fresh_cache(), torch.no_grad():
        made = perfuse.explain(step)
    assert len(made.graphs) == 1
    return made.num_kernels, len(made.graphs[0].fallbacks)


@pytest.mark.parametrize(
    "case",
    (
        Case("AdamW"),
        Case("SGD", {"lr": 0.1, "momentum": 0.9}),
        Case("Adam", {"amsgrad": True, "foreach": True}),
    ),
    ids=str,
)
def test_step_is_a_few_kernels(case: Case) -> None:
    optimiser = case.make(parameters(2 * MIXED, torch.float32))
    optimiser.step()
    kernels, calls = counted(optimiser.step)
    assert kernels <= 4 and not calls


def test_lion_is_one_kernel() -> None:
    params = parameters(2 * MIXED, torch.float32)
    momenta = [torch.zeros_like(p) for p in params]
    wanted, wanted_momenta = parameters(2 * MIXED, torch.float32), [m.clone() for m in momenta]
    kernels, calls = counted(lambda: lion(params, momenta))
    assert kernels == 1 and not calls
    with torch.no_grad():
        lion(wanted, wanted_momenta)
    for got, eager in zip([*params, *momenta], [*wanted, *wanted_momenta], strict=True):
        torch.testing.assert_close(got, eager)


def test_lion_over_large_and_small_tensors_is_a_few_kernels_on_a_gpu() -> None:
    """Tensors of many sizes, which kernels that share no scalar result can be batched over."""
    sizes = [(64,), (1000,), (4096,), (65_536,), (1 << 20,)]
    params = parameters(tuple(4 * sizes), torch.float32)
    momenta = [torch.zeros_like(p) for p in params]
    with fresh_cache(), torch.no_grad():
        made = perfuse.codegen_for(lambda: lion(params, momenta), (), target="cuda:90")
    assert sum(graph.kernels.count("@triton.jit\ndef kernel") for graph in made.graphs) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("case", (Case("AdamW"), Case("Adam", {"amsgrad": True})), ids=str)
def test_step_over_300_tensors_is_a_few_kernels(case: Case) -> None:
    optimiser = case.make(parameters(30 * MIXED, torch.float32))
    optimiser.step()
    kernels, calls = counted(optimiser.step)
    assert kernels <= 10 and not calls
