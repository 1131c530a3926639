"""Modules and autograd: buffers, custom functions, several steps of an optimiser."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.behaviour.row import randn
from tests.harness.backend import compiled
from tests.harness.compare import assert_as_good_as_eager


class Cube(torch.autograd.Function):
    """A gradient of its own: three times the input, not its square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x


class Counter(nn.Module):
    """A buffer that every call moves: backward has to see the value that forward multiplied by,
    not recompute it from the buffer after the call has changed it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls  # type: ignore[no-any-return]


class ApplyCube(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.linear(x))  # type: ignore[no-any-return, no-untyped-call]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 3).long() % 11
        return F.linear(self.embedding(tokens).mean(1), self.embedding.weight)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch_norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 6, 6)),
    "batch_norm_no_momentum": (lambda: nn.BatchNorm1d(5, momentum=None), (8, 5)),
    "group_norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.GELU()), (2, 4, 5, 5)),
    "instance_norm": (
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        (2, 3, 5, 5),
    ),
    "buffer": (Counter, (4, 5)),
    "custom_function": (ApplyCube, (4, 5)),
    "tied_weights": (Tied, (3, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 5, 8)),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)), (2, 3, 8, 8)),
}


def train(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Three steps of plain descent: losses, then parameters and buffers as they ended."""
    losses = []
    for _ in range(3):
        loss = run(x).square().mean()
        parameters = [p for p in module.parameters() if p.requires_grad]
        if parameters:
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.05)
        losses.append(loss.detach())
    return [*losses, *(v.detach().clone() for v in module.state_dict().values())]


@pytest.mark.parametrize("name", MODULES)
def test_three_steps_match_eager(name: str) -> None:
    build, shape = MODULES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain, mine = build(), None
    mine, wide = copy.deepcopy(plain), copy.deepcopy(plain).double()
    x = randn(*shape)
    exact = train(wide, wide, x.double())
    eager = train(plain, plain, x)
    got = train(mine, compiled(mine), x)
    assert_as_good_as_eager(got, eager, exact)


def test_evaluation_after_training_uses_the_running_statistics() -> None:
    torch._dynamo.reset()
    plain = nn.BatchNorm1d(4)
    mine = copy.deepcopy(plain)
    candidate = compiled(mine)
    x = randn(16, 4) * 3 + 1
    plain(x), candidate(x)
    plain.eval(), mine.eval()
    wide = copy.deepcopy(plain).double()
    assert_as_good_as_eager(candidate(x), plain(x), wide(x.double()))
    assert mine.state_dict()["num_batches_tracked"] == 1


def test_inference_keeps_no_graph() -> None:
    torch._dynamo.reset()
    x = randn(3, grad=True)
    with torch.no_grad():
        assert not compiled(lambda t: t.exp())(x).requires_grad


def test_gradient_of_a_part_of_the_outputs() -> None:
    torch._dynamo.reset()
    x = randn(5, grad=True)
    first, second = compiled(lambda t: (t.exp(), t.sin()))(x)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    assert_as_good_as_eager(gradient, x.exp().detach(), x.double().exp().detach())
    assert second.requires_grad


def test_second_backward_needs_retain_graph() -> None:
    torch._dynamo.reset()
    x = randn(5, grad=True)
    y = compiled(lambda t: (t.exp() * t.sin()).sum())(x)
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def norm_with_gradients(g: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """A layer norm's backward: a row's gradient and, in the same sweep, sums over all rows."""
    _, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], w, b, 1e-5)
    masks = [True, True, True]
    return torch.ops.aten.native_layer_norm_backward(g, x, x.shape[-1:], mean, rstd, w, b, masks)


def test_sums_over_many_rows_keep_their_digits() -> None:
    """A sum of n terms of size 1, 32 at a time in float32 and those sums without loss, is off by
    about 2^-24 * 0.4 * sqrt(32 / 2) * sqrt(n): 2.4e-5 here. Sums of 128 added up in float32 gave
    1.3e-4, and one weight of a T5 norm was past its limit."""
    torch.manual_seed(0)
    args = torch.randn(65_536, 32), torch.randn(65_536, 32), torch.randn(32), torch.randn(32)
    got = torch.compile(norm_with_gradients, backend="perfuse")(*args)
    exact = norm_with_gradients(*(a.double() for a in args))
    for sums, reference in zip(got[1:], exact[1:], strict=True):
        assert (sums - reference).square().mean().sqrt() < 6e-5


def test_a_sum_over_rows_can_be_infinite() -> None:
    torch.manual_seed(0)
    g, *rest = torch.randn(300, 32), torch.randn(300, 32), torch.randn(32), torch.randn(32)
    g[200, 3], g[7, 5], g[250, 5] = torch.inf, torch.inf, -torch.inf
    got = torch.compile(norm_with_gradients, backend="perfuse")(g, *rest)
    eager = norm_with_gradients(g, *rest)
    torch.testing.assert_close(got[2], eager[2], equal_nan=True)
    assert torch.isinf(got[2][3]) and torch.isnan(got[2][5])


def quotient(x: Tensor) -> Tensor:
    return (x @ x.mT) / (x @ x.sin().mT).exp()


def normalised(x: Tensor) -> Tensor:
    return F.layer_norm(x @ x.mT, (len(x),))


def transposed(x: Tensor) -> Tensor:
    return quotient(x).t()


def after_its_sine(x: Tensor) -> tuple[Tensor, Tensor]:
    """Eager saves the other quotient, of which the sine is."""
    return quotient(x).sin(), quotient(x)


@pytest.mark.parametrize("function", [quotient, normalised, transposed, after_its_sine])
def test_a_result_may_be_changed_before_the_backward(function: Callable[..., Any]) -> None:
    """Where eager saves the operands, not the result: pyro's splines write into theirs."""
    gradients, start = [], randn(4, 5)
    for call in (function, compiled(function), function):
        x = start.double() if len(gradients) == 2 else start.clone()
        results = call(x.requires_grad_())
        *others, y = results if isinstance(results, tuple) else (results,)
        y[y > 0.5] = 0.0
        (y * torch.arange(4)).sum().add(sum(map(torch.sum, others))).backward()
        gradients.append(x.grad)
    eager, got, exact = gradients
    assert_as_good_as_eager(got, eager, exact)
