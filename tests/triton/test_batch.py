"""One launch over many tensors: its values in Triton's interpreter, and its code for GPUs."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import perfuse
from perfuse.testing import fresh_cache
from tests.harness.compare import assert_as_good_as_eager

SIZES = (1, 64, 5000, 17, 1024, 2049, 300)


def tensors(dtype: torch.dtype = torch.float32, count: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [SIZES[k % len(SIZES)] for k in range(count)]
    return [torch.randn(n, generator=generator).to(dtype) for n in sizes]


def step(params: list[Tensor], grads: list[Tensor], counts: list[Tensor]) -> list[Tensor]:
    """Numbers by tensor, updates in place, and sums."""
    torch._foreach_add_(counts, 1)
    scales = torch._foreach_pow(0.9, counts)
    torch._foreach_addcmul_(params, grads, torch._foreach_mul(grads, scales), value=-0.1)
    return torch._foreach_norm(params)


def arguments(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], ...]:
    return tensors(dtype), tensors(dtype), [torch.zeros((), dtype=dtype) for _ in range(7)]


@pytest.mark.parametrize("is_moved", (False, True), ids=("aligned", "misaligned"))
def test_values(is_moved: bool) -> None:
    given = arguments()
    if is_moved:  # starts at an odd element of a larger tensor
        given[0][2] = torch.cat([torch.zeros(1), given[0][2]])[1:]
    eager, exact = arguments(), arguments(torch.float64)
    for mine, theirs in zip(exact, arguments(), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            a.copy_(b)
    torch._dynamo.reset()
    with fresh_cache(), perfuse.config.patch({"gpu.interpret": True, "verify": "memory"}):
        got = torch.compile(step, backend="perfuse")(*given)
    wanted, known = step(*eager), step(*exact)
    assert_as_good_as_eager([*given, got], [*eager, wanted], [*exact, known])


@pytest.mark.parametrize("target", ("cuda:90", "hip:gfx942"))
def test_compiles(target: str) -> None:
    made = perfuse.codegen_for(step, [*arguments()], target=target)
    (graph,) = made.graphs
    assert graph.objects
    if target == "cuda:90":  # whole steps are read and written four floats at a time
        assert any(re.search(r"ld\.global\.v4", text) for text in graph.assembly)


def test_more_addresses_than_a_launch_takes() -> None:
    given, eager = tensors(count=500), tensors(count=500)
    torch._dynamo.reset()
    with fresh_cache(), perfuse.config.patch({"gpu.interpret": True, "verify": True}):
        torch.compile(torch._foreach_neg_, backend="perfuse")(given)
    torch._foreach_neg_(eager)
    assert all(torch.equal(a, b) for a, b in zip(given, eager, strict=True))
