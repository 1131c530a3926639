"""Tensors whose memory is not what they seem: negative views, and data that is assigned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import perfuse
from tests.behaviour.row import randn
from tests.harness.backend import compiled
from tests.harness.compare import assert_as_good_as_eager


def number(*shape: int) -> Tensor:
    return torch.complex(randn(*shape), randn(*shape) + 1)


# The imaginary part of a conjugate is a negative view: its memory holds the negatives.
NEGATIVE: list[Callable[[Tensor], Any]] = [
    lambda z: z.conj().imag * 2,
    lambda z: (z.conj().imag.sum(0), z.conj().imag),
    lambda z: torch.cat([z.conj().imag.t(), z.real.t()]).exp(),
    lambda z: torch.where(z.real > 0, z.mH.imag.t(), 0.0).cumsum(0),
    lambda z: torch._neg_view(z.real * 3),
    lambda z: torch._neg_view(z.real)[1:] + 1,
    lambda z: (z.conj().imag.view(-1)[1:] + 1) @ z.real.reshape(-1)[1:],
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", NEGATIVE)
def test_negative_views_inside(function: Callable[[Tensor], Any], dynamic: bool) -> None:
    torch._dynamo.reset()
    z = number(4, 3)
    assert_as_good_as_eager(compiled(function, dynamic=dynamic)(z), function(z))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: (x, x.t() * 2, x[1:].sum(0)),
        lambda x: x.softmax(-1) @ x.t(),
        lambda x: (x.mul_(3), x.exp())[1],
    ],
)
def test_negative_views_as_inputs(function: Callable[[Tensor], Any]) -> None:
    """A plain tensor and a negative view, in turn: each has code of its own."""
    torch._dynamo.reset()
    candidate = compiled(function)
    for make in (lambda z: z.imag, lambda z: z.conj().imag, lambda z: z.imag):
        mine, theirs = make(number(4, 3)), make(number(4, 3))
        assert_as_good_as_eager(candidate(mine), function(theirs))
        assert_as_good_as_eager(mine, theirs)


@pytest.mark.parametrize("has_views", [False, True])  # AOTAutograd's runtime takes care of views
def test_negative_views_as_gradients(has_views: bool) -> None:
    torch._dynamo.reset()

    def losses(x: Tensor) -> tuple[Tensor, ...]:
        loss = (x * x.sin()).sum()
        return (loss, x[0], x.view(-1)) if has_views else (loss,)

    def gradient(function: Callable[[Tensor], tuple[Tensor, ...]]) -> Tensor:
        x = randn(3, 4, grad=True)
        function(x)[0].backward(torch._neg_view(torch.ones(())))
        assert x.grad is not None
        return x.grad

    assert_as_good_as_eager(gradient(compiled(losses)), gradient(losses))


@pytest.mark.parametrize("dynamic", [False, True])
def test_zeros_without_memory_as_inputs(dynamic: bool) -> None:
    """A plain tensor and zeros that have no memory at all, in turn."""
    torch._dynamo.reset()

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x * 2 + 1 - y, x.sum(), x @ y.t()

    candidate = compiled(function, dynamic=dynamic)
    plain, zeros = randn(4, 5), torch._efficientzerotensor((4, 5))
    for x, y in ((plain, plain), (zeros, plain), (plain, zeros), (zeros, zeros), (plain, plain)):
        assert_as_good_as_eager(candidate(x, y), function(x, y))


@pytest.mark.parametrize("has_views", [False, True])
def test_zeros_without_memory_as_gradients(has_views: bool) -> None:
    torch._dynamo.reset()
    function = compiled(lambda x: (x.sin() * 2, x[1:]) if has_views else (x.sin() * 2,))
    x = randn(4, 5, grad=True)
    (gradient,) = torch.autograd.grad(function(x)[0], x, torch._efficientzerotensor((4, 5)))
    assert torch.equal(gradient, torch.zeros(4, 5))


@pytest.mark.parametrize("has_views", [False, True])
def test_conjugates_as_gradients(has_views: bool) -> None:
    torch._dynamo.reset()

    def results(x: Tensor) -> tuple[Tensor, ...]:
        made = torch.complex(x, x.sin())
        return (made, x[0], x.view(-1)) if has_views else (made,)

    def gradient(function: Callable[[Tensor], tuple[Tensor, ...]]) -> Tensor:
        x = randn(3, 4, grad=True)
        function(x)[0].backward(number(3, 4).conj())
        assert x.grad is not None
        return x.grad

    assert_as_good_as_eager(gradient(compiled(results)), gradient(results))


def assigned(x: Tensor, y: Tensor) -> Tensor:
    x.data = x.data - 0.1 * y
    return x.sum()


def assigned_part(x: Tensor, y: Tensor) -> Tensor:
    x.data = torch.cat([y, x])[1:4] * 2
    return x.exp()


def assigned_view(x: Tensor, y: Tensor) -> Tensor:
    made = y.exp()
    x.data = made[1:]
    return made.sum()


@pytest.mark.parametrize("verify", [False, "memory"])
@pytest.mark.parametrize("function", [assigned, assigned_part, assigned_view])
def test_assigned_data_outlives_the_call(function: Callable[..., Tensor], verify: Any) -> None:
    """The tensor keeps the memory that it was assigned, which the next call must not reuse."""
    torch._dynamo.reset()

    def run(step: Callable[..., Tensor]) -> list[Tensor]:
        tensors = [randn(4, 3), randn(4, 3) + 1, randn(4, 3) + 2]
        results = [step(x, randn(4, 3) * (k + 1)) for k, x in enumerate(tensors)]
        return [*tensors, *results]

    with perfuse.config.patch(verify=verify):
        got = run(compiled(function))
    assert_as_good_as_eager(got, run(function))


def test_exported_program_compiles() -> None:
    """Its nodes name modules in another way than those of Dynamo."""
    torch._dynamo.reset()
    layers = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(layers, (randn(3, 6),), dynamic_shapes=(rows,)).module()
    candidate = compiled(program, dynamic=None)
    for count in (3, 7, 2):
        x = randn(count, 6)
        assert_as_good_as_eager(candidate(x), layers(x))
