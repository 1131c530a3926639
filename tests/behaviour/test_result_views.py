"""Results that are views: their strides, what they share, and what may be done to them later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import perfuse
from tests.harness.compare import complaints

assert perfuse  # importing it registers the backend

Function = Callable[[Tensor], tuple[Tensor, ...]]


def imaginary_and_flat(x: Tensor) -> tuple[Tensor, ...]:
    t = torch.fft.fft(x).imag
    return t, t.flatten()[1:]


def windows(x: Tensor) -> tuple[Tensor, ...]:
    t = (x + 1).contiguous()
    return t[1:, ::2], t.t()


def strides(x: Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def shared(results: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Pairs of results in one storage, and how many bytes they are apart."""
    starts = [r.untyped_storage().data_ptr() for r in results]
    return [
        (i, j, results[j].data_ptr() - results[i].data_ptr())
        for j in range(len(results))
        for i in range(j)
        if starts[i] == starts[j]
    ]


def gradient(results: Sequence[Tensor], x: Tensor) -> Tensor:
    seeds = [torch.arange(1, r.numel() + 1).reshape(r.shape).to(r.dtype) for r in results]
    return torch.autograd.grad(results, x, seeds)[0]


def check(function: Function, x: Tensor, is_dynamic: bool) -> None:
    """Compare results, their strides and sharing, and gradients with eager."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="perfuse", dynamic=is_dynamic)
    results, eager = compiled(x), function(x)
    assert [strides(r) for r in results] == [strides(e) for e in eager]
    assert shared(results) == shared(eager)
    assert not complaints(list(results), list(eager))
    if x.requires_grad:
        assert not complaints(gradient(results, x), gradient(eager, x))


@pytest.mark.parametrize("function", [imaginary_and_flat, windows], ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_views_of_a_result_that_requires_grad(function: Function, is_dynamic: bool) -> None:
    check(function, torch.randn(5, 8).t().requires_grad_(), is_dynamic)


def test_a_result_can_be_written_to_where_gradients_are_on() -> None:
    """A view that was made with gradients off could not."""
    compiled = torch.compile(windows, backend="perfuse")
    x, weight = torch.randn(4, 6), torch.ones((), requires_grad=True)
    results, eager = compiled(x), windows(x)
    for made in (results, eager):
        made[0].mul_(weight)
    assert results[0].grad_fn is not None
    assert not complaints([r.detach() for r in results], [e.detach() for e in eager])


def test_writing_to_a_result_counts_for_those_that_share_its_memory() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (*windows(x), x.cos()[1:])

    results = torch.compile(function, backend="perfuse")(torch.randn(4, 6))
    before = [r._version for r in results]
    results[0].add_(1)
    assert [r._version > b for r, b in zip(results, before, strict=True)] == [True, True, False]


def test_a_result_can_be_given_another_shape() -> None:
    results = torch.compile(windows, backend="perfuse")(torch.randn(4, 6))
    assert results[1].transpose_(0, 1).shape == (4, 6)
    assert results[0].resize_(2).shape == (2,)
    assert results[1].set_(torch.ones(3)).tolist() == [1, 1, 1]


def complex_and_slice(x: Tensor) -> tuple[Tensor, ...]:
    t = torch.complex(x, x.sin())
    return t, t[x.shape[0] // 2 :], t.flatten()[1:]


def pairs_of_imaginary(x: Tensor) -> tuple[Tensor, ...]:
    t = torch.fft.fft(x).imag
    return t, t.reshape(-1, 2)


def overlapping(x: Tensor) -> tuple[Tensor, ...]:
    return x.repeat_interleave(2, 1).unfold(0, 2, 1), x.sin().unfold(1, 3, 2)


def expanded(x: Tensor) -> tuple[Tensor, ...]:
    t = torch.complex(x, x).sum(0, keepdim=True).expand(3, -1)
    return t, t.real


FUNCTIONS = [complex_and_slice, pairs_of_imaginary, overlapping, expanded, windows]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
def test_views_share_memory_as_in_eager(
    function: Function, is_dynamic: bool, needs_grad: bool
) -> None:
    check(function, torch.randn(6, 8).requires_grad_(needs_grad), is_dynamic)


def test_a_view_of_an_input_at_an_offset() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.view_as_complex(x.view(x.shape[0], x.shape[1] // 2, 2)),)

    x = torch.randn(60)[4:52].view(6, 8)
    check(function, x, is_dynamic=True)


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_a_graph_that_is_retained_gives_its_gradients_again(is_dynamic: bool) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    function = torch.compile(lambda x: x.sin().exp().sum(), backend="perfuse", dynamic=is_dynamic)
    result = function(x)
    (first,) = torch.autograd.grad(result, x, retain_graph=True)
    (second,) = torch.autograd.grad(result, x)
    assert torch.equal(first, second)


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_a_converted_result_is_not_the_memory_it_was_converted_from(is_dynamic: bool) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        t = x * 2
        return t.float(), t.tril().logsumexp((0, 2))

    check(function, torch.randn(3, 5, 4).half().requires_grad_(), is_dynamic)


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_a_repeated_result_of_what_an_input_held_before(is_dynamic: bool) -> None:
    """The value that is repeated is of the old contents; its formula would read the new ones."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        t = x.double() * 0.5
        x[::2].add_(1)
        return t.unsqueeze(0).expand(3, *t.shape), t.cos().unfold(0, 2, 1)

    x = torch.randn(5, 4)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="perfuse", dynamic=is_dynamic)
    got, eager = compiled(x.clone()), function(x.clone())
    assert not complaints(list(got), list(eager))


def views_of_folded_constants(x: Tensor) -> tuple[Tensor, ...]:
    table, given = (torch.arange(6) * 2 + 1).double(), torch.tensor([1.0, 5.0, 3.0])
    return x + table, table.view(2, 3), x[:3] + given, given.unsqueeze(0)


def parts_of_folded_constants(x: Tensor) -> tuple[Tensor, ...]:
    table = (torch.arange(6) * 2 + 1).double()
    return x + table, *table.split(3), table.clone().view(3, 2).t()


@pytest.mark.parametrize("function", [views_of_folded_constants, parts_of_folded_constants])
def test_what_a_caller_does_to_views_of_constants_does_not_change_them(function: Function) -> None:
    x = torch.randn(6).double()
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="perfuse")
    for _ in range(2):
        got, expected = compiled(x), function(x)
        assert all(map(torch.equal, got, expected))
        for result in got:
            result.add_(100)
