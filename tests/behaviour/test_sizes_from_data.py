"""Sizes that depend on data, inside one graph: how many elements are not zero, what a tensor says.

Dynamo breaks the graph at them unless it is told to capture them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import perfuse
from tests.harness.compare import assert_as_good_as_eager

Function = Callable[[Tensor], object]


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    wanted = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(wanted):
        yield


def count(x: Tensor) -> int:
    n = int((x > 0).sum().item())
    torch._check(n >= 0)
    torch._check(n <= x.numel())
    return n


def sliced_by_data(x: Tensor) -> Tensor:
    return x.flatten()[: count(x)].exp() + 1


def counted_from_mask(x: Tensor) -> tuple[Tensor, int]:
    kept = x[x > 0]
    return kept.sin() * 2 + 1, kept.shape[0]


def two_lengths(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[x > 0].exp(), x[x < 0].abs().sum() + torch.ones(count(x)).sum()


PROGRAMS: dict[str, Function] = {
    "nonzero": lambda x: x.nonzero() + 1,
    "mask": lambda x: x[x > 0] * 2,
    "masked_select": lambda x: torch.masked_select(x, x > 0).cos().sum(),
    "unique": lambda x: torch.unique(x.sign()) * 3,
    "made": lambda x: torch.zeros(count(x)) + x.sum(),
    "counted": lambda x: torch.arange(count(x), dtype=torch.float32).sqrt(),
    "sliced": sliced_by_data,
    "mask_and_count": counted_from_mask,
    "two_lengths": two_lengths,
    "rows": lambda x: (x[x.sum(-1) > 0] @ x.t()).softmax(-1),
    "lookup": lambda x: x[(x > 0).nonzero()[:, 0]].sum(-1) * 2,
    "repeated": lambda x: x.repeat_interleave((x[:, 0] > 0).long() + 1, 0).tanh(),
    "joined": lambda x: torch.cat([x[x > 0], x[x <= 0]]).sigmoid(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_for_all_data(name: str) -> None:
    fn = PROGRAMS[name]
    compiled = perfuse.compile(fn, fullgraph=True)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(6, 5)
        torch.testing.assert_close(compiled(x), fn(x))
    everywhere, nowhere = torch.ones(6, 5), -torch.ones(6, 5)
    torch.testing.assert_close(compiled(everywhere), fn(everywhere))
    torch.testing.assert_close(compiled(nowhere), fn(nowhere))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["mask", "masked_select", "sliced", "rows", "joined", "repeated"])
def test_gradients(name: str) -> None:
    fn = PROGRAMS[name]
    compiled = perfuse.compile(fn, fullgraph=True)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(6, 5, requires_grad=True)
        expected, found = fn(x), compiled(x)
        torch.testing.assert_close(found, expected)
        wanted = torch.autograd.grad(expected.square().sum(), x)  # type: ignore[attr-defined]
        given = torch.autograd.grad(found.square().sum(), x)
        torch.testing.assert_close(given, wanted)


def test_statistics_of_groups_for_a_gpu() -> None:
    """Whether they are an image's is asked of sizes of which nothing is known."""

    def function(x: Tensor) -> Tensor:
        chosen = x[x[:, 0, 0, 0] > 0]
        num_images, channels, *plane = chosen.shape
        return chosen.view(2 * num_images, channels // 2, *plane).sum((2, 3))

    x = torch.randn(6, 4, 3, 3)
    with perfuse.config.patch({"gpu.interpret": True}):
        got = torch.compile(function, backend="perfuse", fullgraph=True)(x)
    assert_as_good_as_eager(got, function(x), function(x.double()))
