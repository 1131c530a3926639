"""Training within a memory budget: gradients like eager's, and the peak that was promised."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import perfuse
from perfuse.budget.simulate import simulate
from perfuse.capture.observe import observing_cuts
from perfuse.testing import peak_memory, trace_allocations
from tests.harness.compare import assert_as_good_as_eager

WIDTH, ROWS, LAYERS = 64, 2048, 4


class Block(nn.Module):
    """A residual block with a norm, two products, an activation, and maybe dropout."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(self.norm(x)))
        return x + F.dropout(self.down(inner), self.p)


def model(p: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(p) for _ in range(LAYERS)))


class Run:
    """A model compiled under a budget: its gradients, and its peaks as promised and measured."""

    def __init__(self, net: nn.Module, budget: Any, **options: Any) -> None:
        self.net, self.x = net, torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
        self.promised: list[int] = []
        torch._dynamo.reset()
        self.call = torch.compile(
            self.loss,
            backend="perfuse",
            fullgraph=True,
            options={"memory_budget": budget, **options},
        )
        with observing_cuts(lambda cut, context: self.note(simulate(cut, context).peak)):
            self.gradients = self.step()

    def note(self, peak: int) -> None:
        self.promised.append(peak)

    def loss(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()

    def step(self) -> list[Tensor]:
        self.net.zero_grad(set_to_none=True)
        self.call(self.x).backward()
        return [p.grad for p in self.net.parameters() if p.grad is not None]

    def forget(self) -> None:
        self.step()
        self.gradients = []
        self.net.zero_grad(set_to_none=True)

    def peak(self) -> int:
        self.forget()
        return peak_memory(lambda: self.call(self.x).backward())


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad(set_to_none=True)
    net(x).square().mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def test_sweep() -> None:
    """Every budget: gradients as good as eager's, the measured peak as promised, never rising."""
    net = model()
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    eager = gradients(net, x)
    exact = gradients(model().double(), x.double())
    promised, measured = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", perfuse.BudgetWarning)
        for budget in (1.0, 0.85, 0.7, 0.55, 0.4):
            run = Run(net, budget)
            for got, near, truth in zip(run.gradients, eager, exact, strict=True):
                assert_as_good_as_eager(got, near, truth)
            promised.append(run.promised[0])
            measured.append(run.peak())
    assert promised == sorted(promised, reverse=True) and len(set(promised)) >= 3
    assert measured == sorted(measured, reverse=True)
    for said, seen in zip(promised, measured, strict=True):
        assert abs(seen - said) <= 0.03 * said


def test_bytes_and_fractions_agree() -> None:
    free = Run(model(), 1.0).promised[0]
    by_fraction = Run(model(), 0.7).promised[0]
    assert by_fraction <= 0.7 * free
    assert Run(model(), int(0.7 * free)).promised[0] == by_fraction
    assert Run(model(), f"{0.7 * free / 1024:.3f}KiB").promised[0] <= 0.7 * free


def test_dropout_draws_the_same_numbers_again() -> None:
    """Random values are kept, never drawn twice: with equal seeds, equal gradients."""
    net = model(0.3)

    def seeded(budget: float) -> list[Tensor]:
        torch.manual_seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", perfuse.BudgetWarning)
            return [g.clone() for g in Run(net, budget).gradients]

    for all_kept, few_kept in zip(seeded(1.0), seeded(0.0), strict=True):
        torch.testing.assert_close(all_kept, few_kept)


def test_misses_are_told() -> None:
    with pytest.warns(perfuse.BudgetWarning, match="cannot be met.*at least"):
        Run(model(), "64KiB")
    with pytest.raises(Exception, match="needs at least") as caught:
        Run(model(), "64KiB", over_budget="raise")
    assert isinstance(caught.value.__cause__ or caught.value, Exception)
    with pytest.raises(Exception, match="not a unit of memory"):
        Run(model(), "64 parsecs")


def test_retained_graphs_keep_what_is_saved() -> None:
    net = model()
    run = Run(net, 0.6)
    loss = run.call(run.x)
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(net.parameters()))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_dynamic_sizes() -> None:
    net = model()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", perfuse.BudgetWarning)
        call: Callable[[Tensor], Tensor] = torch.compile(
            net, backend="perfuse", dynamic=True, options={"memory_budget": 0.5}
        )
        for rows in (512, 1024):
            x = torch.randn(rows, WIDTH)
            eager = gradients(net, x)
            exact = gradients(model().double(), x.double())
            net.zero_grad(set_to_none=True)
            call(x).square().mean().backward()
            got = [p.grad for p in net.parameters() if p.grad is not None]
            for ours, near, truth in zip(got, eager, exact, strict=True):
                assert_as_good_as_eager(ours, near, truth)


MARK_BYTES = 12_347  # a size that nothing else has


def test_without_a_budget_what_is_saved_goes_as_the_backward_runs() -> None:
    """The backward holds less and less: gradients take the place of what was saved."""
    net = model()
    torch._dynamo.reset()
    call = torch.compile(net, backend="perfuse")
    x = torch.randn(ROWS, WIDTH)
    call(x).sum().backward()
    y = call(x).sum()
    marks: list[torch.Tensor] = []
    hook = net[0].up.weight.register_post_accumulate_grad_hook(
        lambda _: marks.append(torch.empty(MARK_BYTES, dtype=torch.uint8))
    )
    sizes = [event.num_bytes for event in trace_allocations(y.backward)]
    hook.remove()
    gradients = sum(p.nbytes for p in net.parameters())
    assert sum(sizes[: sizes.index(MARK_BYTES)]) < gradients
