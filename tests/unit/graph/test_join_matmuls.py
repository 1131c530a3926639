"""A cat of products becomes one product: where it does, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.compare import assert_as_good_as_eager
from tests.unit.graph.tracing import after_passes, calls, traced


def values(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, then two weights and two biases."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 5), (5, 3), (5, 4), (3,), (4,)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def biased(x: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.cat([torch.addmm(b, x, w), torch.addmm(c, x, u)], 1)


def unbiased(x: Tensor, w: Tensor, u: Tensor, *_: Tensor) -> Tensor:
    return torch.cat([x @ w, x @ u, x @ w.sin()], -1)


def transposed(x: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor) -> Tensor:
    w, u = w.t().contiguous().t(), u.t().contiguous().t()
    return torch.cat([torch.addmm(b, x, w), torch.addmm(c, x, u)], 1)


def also_used(x: Tensor, w: Tensor, u: Tensor, *_: Tensor) -> Any:
    a = x @ w
    return torch.cat([a, x @ u], 1), a


def of_two_values(x: Tensor, w: Tensor, u: Tensor, *_: Tensor) -> Tensor:
    return torch.cat([x @ w, x.sin() @ u], 1)


def below_each_other(x: Tensor, w: Tensor, *_: Tensor) -> Tensor:
    return torch.cat([x @ w, x @ w.sin()], 0)


def with_another(x: Tensor, w: Tensor, *_: Tensor) -> Tensor:
    return torch.cat([x @ w, x], 1)


def of_few_rows(x: Tensor, w: Tensor, u: Tensor, *_: Tensor) -> Tensor:
    return torch.cat([x[:4] @ w, x[:4] @ u], 1)


def scaled(x: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.cat([torch.addmm(b, x, w, beta=2), torch.addmm(c, x, u, beta=2)], 1)


def written_before(x: Tensor, w: Tensor, u: Tensor, *_: Tensor) -> Tensor:
    torch.ops.aten.copy_(w, w.sin())
    return torch.cat([x @ w, x @ u], 1)


@pytest.mark.parametrize(
    "fn, num_products",
    [
        (biased, 1),
        (unbiased, 1),
        (transposed, 1),
        (also_used, 2),
        (of_two_values, 2),
        (below_each_other, 2),
        (with_another, 1),
        (of_few_rows, 2),
        (scaled, 2),
        (written_before, 2),
    ],
)
def test_products(fn: Callable[..., Any], num_products: int) -> None:
    args = values()
    module = after_passes(traced(fn, *args, decompose=True))
    names = [call.split("(")[0] for call in calls(module)]
    assert sum(name in ("mm", "addmm") for name in names) == num_products
    exact = fn(*values(torch.float64))
    assert_as_good_as_eager(module(*values()), fn(*values()), exact)


def test_weights_are_copied_as_they_lie() -> None:
    args = values()
    module = after_passes(traced(transposed, *args, decompose=True))
    cats = [n for n in module.graph.nodes if n.target is torch.ops.aten.cat.default]
    assert [tuple(n.meta["val"].shape) for n in cats] == [(7, 5), (7,)]


def test_a_cat_of_inputs_is_left_alone() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], 1)

    x, y = torch.randn(4, 3), torch.randn(4, 5)
    torch.testing.assert_close(torch.compile(fn, backend="perfuse")(x, y), fn(x, y))
