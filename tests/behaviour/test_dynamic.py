"""Sizes that change: right for each, and one compile for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError

import perfuse
from tests.behaviour.row import randn
from tests.harness.backend import Counting
from tests.harness.compare import assert_as_good_as_eager

# From 4 on, so that no slice of theirs has size 1, which Dynamo always takes as a case of its own.
SIZES = (4, 5, 7, 8, 13, 21, 34, 55, 89, 144)


def normalise(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]).softmax(0)


def reshape(x: Tensor) -> Tensor:
    return x.reshape(-1).view(x.shape[1], x.shape[0]).cumsum(0)


def sizes_as_numbers(x: Tensor) -> Tensor:
    return x.sum(0) / x.shape[0] + torch.arange(x.shape[1], device=x.device)


def concatenate(x: Tensor) -> Tensor:
    return torch.cat([x, x[1:] * 2, x.flip(0)], dim=0)


def sizes_by_formula(x: Tensor) -> tuple[Tensor, Tensor]:
    """Padded for a fast Fourier transform, and a part and factors of odd formulas."""
    n = x.shape[0]
    padded = F.pad(x, (0, 0, 0, 2 ** math.ceil(math.log2(n)) - n))
    return padded * round(n / 3, 1), x[: (n & 3) + (n >> 1)] * math.log(n) + n**1.5


FUNCTIONS = (normalise, reshape, sizes_as_numbers, concatenate)


@pytest.mark.parametrize("dynamic", (True, None), ids=("dynamic", "automatic"))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_ten_sizes_one_compile(function: Callable[[Tensor], Tensor], dynamic: bool | None) -> None:
    torch._dynamo.reset()
    counting = Counting()
    candidate = torch.compile(function, backend=counting, dynamic=dynamic)
    for size in SIZES:
        x = randn(size, 6)
        assert_as_good_as_eager(candidate(x), function(x), function(x.double()))
    # Automatic: the first size is taken as fixed, the second one makes the dimension dynamic.
    assert counting.num_graphs == (1 if dynamic else 2)


def test_dynamic_training() -> None:
    torch._dynamo.reset()
    counting = Counting()
    layer = torch.nn.Linear(6, 4)
    candidate = torch.compile(lambda x: F.gelu(layer(x)).mean(), backend=counting, dynamic=True)
    for size in SIZES:
        x = randn(size, 6)
        got = torch.autograd.grad(candidate(x), list(layer.parameters()))
        eager = torch.autograd.grad(F.gelu(layer(x)).mean(), list(layer.parameters()))
        wide = torch.nn.Linear(6, 4).double()
        wide.load_state_dict(layer.state_dict())
        exact = torch.autograd.grad(F.gelu(wide(x.double())).mean(), list(wide.parameters()))
        assert_as_good_as_eager(got, eager, exact)
    assert counting.num_graphs == 1


def test_zero_and_one_still_work_after_a_dynamic_compile() -> None:
    torch._dynamo.reset()
    candidate = torch.compile(concatenate, backend=Counting(), dynamic=True)
    for size in (4, 1, 0, 7):
        x = randn(size, 3)
        assert_as_good_as_eager(candidate(x), concatenate(x), concatenate(x.double()))


def two_norms(x: Tensor) -> Tensor:
    """Four means, each of a single element where there is one row, divided by the row's length."""
    norms = [F.layer_norm(y, x.shape[-1:]) for y in (x.sin(), x.cos())]
    return torch.stack(norms) * torch.arange(x.shape[-1])


@pytest.mark.parametrize("interpret", (False, True), ids=("cpu", "interpreted"))
def test_equal_small_kernels_that_use_a_size_as_a_number(interpret: bool) -> None:
    """A batch knows how many elements its parts have, and no other size."""
    torch._dynamo.reset()
    with perfuse.config.patch({"gpu.interpret": interpret}):
        candidate = torch.compile(two_norms, backend="perfuse", dynamic=True)
        for size in (7, 12):
            x = randn(1, size).requires_grad_()
            wide = x.detach().double().requires_grad_()
            got, eager, exact = (
                torch.autograd.grad(f(y).sum(), y)[0]
                for f, y in ((candidate, x), (two_norms, x), (two_norms, wide))
            )
            assert_as_good_as_eager(got, eager, exact)


def test_operands_of_calls_are_laid_out_as_in_eager() -> None:
    """Also where sizes are symbols: the layout of ATen's result follows its operands."""

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        return torch.polar(y.abs() + 1, y)

    torch._dynamo.reset()
    candidate = torch.compile(function, backend="perfuse", dynamic=True)
    for sizes in ((5, 6, 3), (4, 7, 2)):
        x = randn(*sizes).transpose(0, -1)
        assert candidate(x).stride() == function(x).stride()


def test_sizes_by_formula() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(sizes_by_formula, backend="perfuse", dynamic=True)
    for size in (9, 12, 5):
        x = randn(size, 3)
        exact = sizes_by_formula(x.double())
        assert_as_good_as_eager(compiled(x), sizes_by_formula(x), exact)


def _row(x: Tensor, index: int) -> Tensor:
    return x[index].exp()


def _with_row(x: Tensor, index: int) -> Tensor:
    x = x.clone()
    x[index] = 5
    return x * 2


@pytest.mark.parametrize("function", [_row, _with_row])
def test_index_that_changes(function: Callable[[Tensor, int], Tensor]) -> None:
    """Counted from either end, and refused where there is nothing, also unlike the call before."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="perfuse", dynamic=True)
    x = randn(20, 3)
    for index in (3, 4, -1, -2, 19, -20):
        torch.testing.assert_close(compiled(x, index), function(x, index))
    for index in (20, -21):
        with pytest.raises((IndexError, TorchRuntimeError)):
            compiled(x, index)


def test_place_that_smaller_sizes_have_not() -> None:
    torch._dynamo.reset()

    def function(x: Tensor) -> Tensor:
        rows = [torch.select(x, 0, at) for at in (1, -2, 11, -15, 4)]
        return torch.stack(rows).exp()

    compiled = torch.compile(function, backend="perfuse", dynamic=True)
    for size in (20, 15):
        x = randn(size, 3)
        torch.testing.assert_close(compiled(x), function(x))
    for size in (14, 11, 1):
        with pytest.raises((IndexError, TorchRuntimeError)):
            compiled(randn(size, 3))
