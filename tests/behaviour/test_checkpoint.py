"""torch.utils.checkpoint through torch.compile: regions and policies are honoured."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import perfuse
from perfuse.capture.observe import observing_cuts
from perfuse.graph.partition import Cut
from tests.harness.compare import assert_as_good_as_eager

SIZE = 64
MM, TANH = torch.ops.aten.mm.default, torch.ops.aten.tanh.default


def block(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(x @ a) @ b)


def plain(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return block(x.sin(), a, b).square().sum()


def whole(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return checkpoint(block, x.sin(), a, b, use_reentrant=False).square().sum()


def selective(policies: dict[Any, CheckpointPolicy], default: CheckpointPolicy) -> Any:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policies.get(op, default)

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def fn(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        out = checkpoint(block, x.sin(), a, b, use_reentrant=False, context_fn=contexts)
        return out.square().sum()

    return fn


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(SIZE, SIZE, generator=generator) / 8 for _ in range(3))
    return [x.requires_grad_() for x in drawn]


def cut_of(fn: Any, **options: Any) -> Cut:
    """How `fn` is cut, its gradients being as good as eager's."""
    cuts: list[Cut] = []
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="perfuse", fullgraph=True, options=options or None)
    with observing_cuts(lambda cut, _: cuts.append(cut)):
        args = inputs()
        got = torch.autograd.grad(compiled(*args), args)
    args = inputs()
    eager = torch.autograd.grad(plain(*args), args)
    wide = [x.detach().double().requires_grad_() for x in inputs()]
    assert_as_good_as_eager(got, eager, torch.autograd.grad(plain(*wide), wide))
    return cuts[0]


def made(nodes: Any) -> list[str]:
    return [n.target._opname for n in nodes if n.op == "call_function"]


def test_without_a_checkpoint_products_are_kept() -> None:
    cut = cut_of(plain)
    assert "mm" not in made(cut.recomputed)


def test_a_region_keeps_only_its_inputs() -> None:
    cut = cut_of(whole)
    assert made(cut.recomputed).count("mm") >= 1
    assert "mm" not in made(cut.saved) and "tanh" not in made(cut.saved)


MUST_SAVE, PREFER_SAVE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE
MUST_AGAIN, PREFER_AGAIN = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("keep", [MUST_SAVE, PREFER_SAVE])
@pytest.mark.parametrize("again", [MUST_AGAIN, PREFER_AGAIN])
def test_policies(keep: CheckpointPolicy, again: CheckpointPolicy) -> None:
    products_kept = cut_of(selective({MM: keep}, again))
    assert "mm" in made(products_kept.saved) and "mm" not in made(products_kept.recomputed)
    assert "tanh" in made(products_kept.recomputed) and "tanh" not in made(products_kept.saved)
    tanh_kept = cut_of(selective({TANH: keep}, again))
    assert made(tanh_kept.saved).count("tanh") == 2
    assert "tanh" not in made(tanh_kept.recomputed)


def test_policies_under_a_budget() -> None:
    """Values that must be saved or recomputed are, however small the budget."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", perfuse.BudgetWarning)
        kept = cut_of(selective({MM: MUST_SAVE}, MUST_AGAIN), memory_budget=0.0)
        free = cut_of(selective({MM: MUST_AGAIN}, MUST_AGAIN), memory_budget=1.0)
    assert "mm" not in made(kept.recomputed)
    assert "mm" not in made(free.saved) and "mm" in made(free.recomputed)
