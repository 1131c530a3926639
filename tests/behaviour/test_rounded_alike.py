"""Values of a small float are the same numbers for all who read them.

A maximum, a sum or a mean is taken from elements that are rounded, because they are in memory, or
from ones that are not. Whoever uses it with the elements, in another sweep, kernel or graph, must
see the same ones: otherwise a saturated softmax is off by the rounding of its logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perfuse import config
from tests.behaviour.row import randn
from tests.harness.backend import compiled
from tests.harness.compare import norm_complaints

Program = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]


def contrastive(a: Tensor, b: Tensor) -> Tensor:
    """Logits read by rows and by columns are stored in the forward, and recomputed afterwards."""
    logits, wanted = a @ b.t() / 0.02, torch.arange(a.shape[0])
    return F.cross_entropy(logits, wanted) + F.cross_entropy(logits.t(), wanted)


def with_bias(a: Tensor, b: Tensor) -> Tensor:
    logits, wanted = a @ b.t() * 50 + a.mean(1, keepdim=True), torch.arange(a.shape[0])
    return F.cross_entropy(logits, wanted) + F.cross_entropy(logits.t(), wanted)


def returned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The caller gets rounded logits, and the sum is taken of these."""
    logits = (a @ b.t()) * 50 + 1
    return logits, torch.logsumexp(logits, 1).sum() - logits.diagonal().sum()


def of_several_kernels(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel over rows stores the logits, the one over columns reads them, the last both."""
    logits = (a @ b.t()) * 50 - a.sum(1, keepdim=True)
    rows, columns = torch.softmax(logits, 1), torch.softmax(logits, 0)
    return (rows * columns).diagonal().log().sum(), (rows - columns).square().sum()


def with_mean(a: Tensor, b: Tensor) -> Tensor:
    logits = (a @ b.t()) * 50
    logits = logits + logits.mean()
    sums = torch.logsumexp(logits, 1)
    return F.cross_entropy(logits, torch.arange(a.shape[0])) + 0.01 * sums.square().mean()


def nearly_constant(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    x = ((a @ b.t()) * 0.01 + 100) * 1.5
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).square().mean(1, keepdim=True)
    return ((x - mean) * torch.rsqrt(variance + 1e-3)).pow(3).sum(), x.sum(0)


def less_row_sums(a: Tensor, b: Tensor) -> Tensor:
    """The forward has the sums at hand, the backward gets them rounded."""
    x = a * 40
    logits = x * 10 - x.sum(1, keepdim=True)
    return (torch.softmax(logits, 1) * F.log_softmax(logits, 1).clamp_min(-50)).sum(1) + b[:, 0]


PROGRAMS: tuple[Program, ...] = (
    contrastive,
    with_bias,
    returned,
    of_several_kernels,
    with_mean,
    nearly_constant,
    less_row_sums,
)


def close_pair(dtype: torch.dtype) -> list[Tensor]:
    """Rows of length one, each near one of the others: their softmax is saturated."""
    a = F.normalize(randn(33, 40), dim=1)
    b = F.normalize(a + 0.05 * randn(40, 33).t(), dim=1)
    return [x.to(dtype).requires_grad_() for x in (a, b)]


def results(program: Program, inputs: list[Tensor]) -> list[Tensor]:
    """The results, and the gradients of their sum, the large ones at a smaller weight."""
    made = program(*inputs)
    outputs = made if isinstance(made, tuple) else (made,)
    weights = [torch.ones_like(o) if o.dim() == 0 else torch.full_like(o, 0.01) for o in outputs]
    gradients = torch.autograd.grad(outputs, inputs, weights)
    return [x.detach() for x in (*outputs, *gradients)]


def check(program: Program, dtype: torch.dtype) -> None:
    inputs = close_pair(dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = results(program, wide)
    eager = results(program, inputs)
    assert not norm_complaints(results(compiled(program), inputs), eager, exact)


@pytest.mark.parametrize("level", (1, 3))
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_belong_to_the_forward(program: Program, level: int) -> None:
    with config.patch(recompute_level=level):
        check(program, torch.bfloat16)


def test_halves() -> None:
    check(contrastive, torch.float16)


def test_in_a_region_of_autocast() -> None:
    def in_region(a: Tensor, b: Tensor) -> tuple[Tensor, ...] | Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return contrastive(a, b)

    inputs = close_pair(torch.float32)
    exact = results(contrastive, [x.detach().double().requires_grad_() for x in inputs])
    eager, got = results(in_region, inputs), results(compiled(in_region), inputs)
    rounding = torch.finfo(torch.bfloat16).eps
    for mine, theirs, wanted in zip(got, eager, exact, strict=True):
        limit = 2 * (theirs - wanted).norm() + rounding * wanted.norm()
        assert (mine - wanted).norm() <= limit


def below_columns(x: Tensor) -> Tensor:
    """Another kernel than that of the maxima subtracts them."""
    logits = x * 50
    return torch.exp(logits - logits.amax(0))


def below_all(x: Tensor) -> Tensor:
    logits = x * 50
    return torch.exp(logits - logits.max())


def below_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    logits = x * 50
    largest = logits.max(0).values
    return torch.exp(logits - largest), -largest.abs()


def below_running(x: Tensor) -> Tensor:
    logits = x * 50
    return torch.exp(logits - logits.cummax(-1).values)


def below_first(x: Tensor) -> Tensor:
    logits = x * 50
    return torch.exp(logits - logits.topk(1, -1).values)


def below_sorted(x: Tensor) -> Tensor:
    logits = x * 50
    return torch.exp(logits - logits.sort(0).values[-1])


def below_sum(x: Tensor) -> Tensor:
    """The largest is all of the sum."""
    logits = x * 50
    return torch.exp(logits - torch.logsumexp(logits, (0, 1)))


def below_those_of_groups(x: Tensor) -> Tensor:
    logits, groups = x * 50, torch.arange(x.shape[0]) * 7 % 5
    least = torch.full((5, x.shape[1]), -torch.inf, dtype=x.dtype)
    return torch.exp(logits - least.index_reduce(0, groups, logits, "amax")[groups])


CHOICES: list[Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]] = [
    below_columns,
    below_all,
    below_returned,
    below_running,
    below_first,
    below_sorted,
    below_sum,
    below_those_of_groups,
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", CHOICES)
def test_no_element_exceeds_the_largest(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """The largest is an element, as it is in memory: others are subtracted from the same ones."""
    x = (randn(300, 70) * 8).to(dtype)
    got = compiled(function)(x)
    (found, *_) = got if isinstance(got, tuple) else (got,)
    assert found.max() == 1


def from_row_means(z: Tensor) -> Tensor:
    return z - z.mean(1, keepdim=True)


def from_column_sums(z: Tensor) -> Tensor:
    return z - z.sum(0) / z.shape[0]


def from_returned_means(z: Tensor) -> tuple[Tensor, Tensor]:
    mean = z.mean(0)
    return z - mean, mean


def from_multiplied_means(z: Tensor) -> Tensor:
    return z - torch.ones(z.shape[0], 1, dtype=z.dtype) @ z.mean(0, keepdim=True)


def standardised(z: Tensor) -> Tensor:
    variance, mean = torch.var_mean(z, 0)
    return (z - mean) * torch.rsqrt(variance + 1e-5)


def from_pooled(z: Tensor) -> Tensor:
    return z - F.adaptive_avg_pool2d(z[None, None], 1)


DEVIATIONS = [
    from_row_means,
    from_column_sums,
    from_returned_means,
    from_multiplied_means,
    standardised,
    from_pooled,
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", DEVIATIONS)
def test_deviations_from_a_rounded_mean(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """All elements are rounded to the one number near which their mean is."""

    def program(x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return function(x * 0.01 + 100.2)  # type: ignore[no-any-return]

    torch._dynamo.reset()
    x = randn(32, 48).to(dtype)
    eager, exact, got = program(x), program(x.double()), compiled(program)(x)
    assert not norm_complaints(got, eager, exact)
