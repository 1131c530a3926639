"""Gradients that go to the elements equal to a maximum: the backward must find the same elements.

An element computed again in another kernel may be rounded differently, and no element is then equal
to the maximum that was kept: the gradient, shared among none, is not a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from perfuse import config
from perfuse.graph.saving.policy import SavePolicy
from perfuse.graph.saving.ties import compared_with_themselves
from tests.behaviour.row import Behaviour, randn
from tests.harness.backend import compiled
from tests.unit.graph.joint import kept, traced_joint

INF = math.inf


def gated(x: Tensor) -> Tensor:
    """Rounded differently where the sigmoid alone is wanted too."""
    return torch.sigmoid(x * 1.7 + 0.3) * x


def scattered(x: Tensor) -> Tensor:
    rows = (torch.arange(x.shape[0], device=x.device) % 3)[:, None].expand(x.shape)
    into = torch.zeros(3, x.shape[1], dtype=x.dtype, device=x.device)
    return into.scatter_reduce(0, rows, gated(x), "amax", include_self=False)


def checkpointed(x: Tensor) -> Tensor:
    found: Tensor = checkpoint(lambda y: gated(y).amax(-1).exp(), x, use_reentrant=False)
    return found


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: gated(x).amax(-1),
    "amin": lambda x: F.silu(x).amin(0, keepdim=True),
    "max": lambda x: gated(x).max(),
    "norm": lambda x: torch.linalg.vector_norm(gated(x), INF, -1),
    "distance": lambda x: torch.cdist(gated(x), gated(x)[:2] + 1, p=INF),
    "scatter": scattered,
    "of_a_mean": lambda x: (x.mean(0) * torch.sigmoid(x[0])).amax(0),
    "of_a_view": lambda x: gated(x).reshape(-1, 2).amax(0),
    "by_hand": lambda x: (gated(x) * (gated(x) >= gated(x).amax(-1, keepdim=True))).sum(-1),
    "checkpoint": checkpointed,
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_matches_eager(name: str) -> None:
    Behaviour(name, REDUCTIONS[name], lambda: [randn(34, 70, grad=True)]).check()


def test_halves_are_rounded_before_they_are_compared() -> None:
    """One rounding of one product: the same bits as eager's, widened or not."""

    def distances(x: Tensor, y: Tensor) -> Tensor:
        wide = (x * y).float()
        return torch.cdist(wide, wide[:2] + 1, p=INF)

    def is_largest(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).float() == (x * y).amax(-1, keepdim=True).float()

    x, y = (randn(*shape).bfloat16().requires_grad_() for shape in ((34, 70), (1, 70)))
    assert torch.equal(compiled(is_largest)(x, y), is_largest(x, y))
    got = torch.autograd.grad(compiled(distances)(x, y).sum(), [x, y])
    torch.testing.assert_close(got, torch.autograd.grad(distances(x, y).sum(), [x, y]))


@pytest.mark.parametrize("budget", (0.0, 0.5))
def test_within_a_memory_budget(budget: float) -> None:
    with config.patch({"memory_budget": budget}):
        Behaviour("amax", REDUCTIONS["amax"], lambda: [randn(34, 70, grad=True)]).check()


@pytest.mark.parametrize("level", range(4))
def test_the_comparison_is_kept(level: int) -> None:
    joint = traced_joint(REDUCTIONS["amax"], (torch.randn(34, 70),)).graph
    assert [n.target for n in compared_with_themselves(joint)] == [torch.ops.aten.mul.Tensor]
    targets = [n.target for n in kept(joint, SavePolicy(level=level))]
    assert torch.ops.aten.mul.Tensor in targets or torch.ops.aten.eq.Tensor in targets


def test_other_comparisons_keep_nothing() -> None:
    def masked(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(torch.sigmoid(x) == torch.sigmoid(y), x, y).relu()

    joint = traced_joint(masked, (torch.randn(4), torch.randn(4))).graph
    assert not compared_with_themselves(joint)


@pytest.mark.parametrize("order", [1, 2, 3, INF])
def test_one_element_divided_by_its_norm_is_one(order: float) -> None:
    """And has no gradient: a norm that follows has nothing to amplify but roundings of float32."""

    def signs(x: Tensor) -> Tensor:
        return F.normalize(gated(x) + 3, p=order, dim=1)

    x = randn(4, 1, 70, grad=True).to(torch.bfloat16).detach().requires_grad_()
    result = compiled(signs, "perfuse")(x)
    assert bool((result == 1).all())
    (slope,) = torch.autograd.grad(result, x, torch.full_like(result, 1e4))
    assert float(slope.abs().max()) <= 1e4 * 16 * torch.finfo(torch.float32).eps
