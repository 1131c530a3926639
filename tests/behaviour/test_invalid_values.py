"""Values that an op does not take: what eager's CPU kernels make of them, an error or NaN."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

NAN, INF = float("nan"), float("inf")


def test_binary_cross_entropy_takes_probabilities() -> None:
    """In training, compiled, as in eager; and valid ones have a gradient."""

    def losses(x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(x.mul(2), target, reduction="none").sum(0)

    compiled = torch.compile(losses, backend="perfuse")
    right = torch.linspace(0.1, 0.4, 12).view(3, 4)
    for name, outside in product(("input", "target"), (1.5, -0.1, NAN)):
        x, target = right.clone().requires_grad_(), right.flip(0)
        compiled(x, target).sum().backward()
        (expected,) = torch.autograd.grad(losses(x, target).sum(), x)
        torch.testing.assert_close(x.grad, expected)
        with torch.no_grad():
            (x if name == "input" else target)[1, 2] = outside
        for function in (losses, compiled):
            with pytest.raises(RuntimeError, match=f"all elements of {name} should be between"):
                function(x, target)


def test_grid_sampling_at_no_place() -> None:
    def sampled(x: Tensor, grid: Tensor) -> list[Tensor]:
        ways = product(("bilinear", "nearest"), ("zeros", "border", "reflection"))
        return [F.grid_sample(x, grid, mode, padding, False) for mode, padding in ways]

    x = torch.randn(1, 2, 3, 4)
    places = [[NAN, NAN], [NAN, 0.2], [0.2, NAN], [INF, 0.1], [0.1, -INF], [0.3, -0.4], [9.1, 0.7]]
    grid = torch.tensor(places).view(1, -1, 1, 2)
    compiled = torch.compile(sampled, backend="perfuse")
    torch.testing.assert_close(compiled(x, grid), sampled(x, grid), equal_nan=True)


@pytest.mark.parametrize("pad", [(-3, 4), (-1, -2), (0, 0, 5, -4)])
def test_a_padding_crops_no_more_than_there_is(pad: tuple[int, ...]) -> None:
    def padded(x: Tensor) -> Tensor:
        return F.pad(x, pad).sin()

    torch._dynamo.reset()
    for function in (padded, torch.compile(padded, backend="perfuse")):
        with pytest.raises(RuntimeError, match="must be non-negative"):
            function(torch.ones(3, 2))


def test_nor_with_sizes_and_paddings_that_change() -> None:
    def padded(x: Tensor, n: int) -> Tensor:
        return F.pad(x, (-n, n + 1)).sin()

    torch._dynamo.reset()
    compiled = torch.compile(padded, backend="perfuse", dynamic=True)
    for size, n in ((8, 3), (5, 2), (3, 3)):
        x = torch.rand(3, size)
        torch.testing.assert_close(compiled(x, n), padded(x, n))
    for size, n in ((2, 3), (8, 9)):
        for function in (padded, compiled):
            with pytest.raises(RuntimeError, match="must be non-negative"):
                function(torch.ones(3, size), n)
