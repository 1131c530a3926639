"""Linear layers in FP8 against float64, with limits that follow from the formats."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perfuse.precision.fp8_linear import WAYS, fp8_linear
from perfuse.precision.quantise import E4M3, E5M2

ROWS, INNER, OUTER = 48, 256, 128
SCALINGS = [*WAYS, "delayed"]
# Half a unit in the last place, relative; half of the least number over the largest.
E4M3_ERROR, E4M3_LEAST = 2.0**-4, 2.0**-10 / 448
E5M2_ERROR, E5M2_LEAST = 2.0**-3, 2.0**-17 / 57344
FLOAT32 = 2.0**-24


class Case(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor
    gradient: Tensor


def case(dtype: torch.dtype = torch.float32) -> Case:
    """Rows and columns of very different sizes, as activations have them."""
    torch.manual_seed(0)
    sizes = torch.exp2(torch.randint(-3, 3, (ROWS, 1)).float())
    x = torch.randn(ROWS, INNER) * sizes
    weight = torch.randn(OUTER, INNER) / 16
    gradient = torch.randn(ROWS, OUTER) / 1000
    tensors = (t.to(dtype) for t in (x, weight, torch.randn(OUTER), gradient))
    x, weight, bias, gradient = tensors
    return Case(*(t.requires_grad_() for t in (x, weight, bias)), gradient)


def histories(scaling: str) -> list[Tensor]:
    return [torch.zeros(2, 4), torch.zeros(4)] if scaling == "delayed" else []


def run(scaling: str, given: Case, dtype: torch.dtype) -> list[Tensor]:
    result = fp8_linear(*given[:3], scaling, dtype, *histories(scaling))
    result.backward(given.gradient.to(dtype))
    return [result.detach(), *(t.grad for t in given[:3] if t.grad is not None)]


def error_of(x: Tensor, relative: float, least: float, amax: Tensor) -> Tensor:
    """The most by which quantising changes each element; scales are up to twice the least."""
    return relative * x.abs() + 2 * least * amax


def limit(a: Tensor, a_error: Tensor, b: Tensor, b_error: Tensor) -> Tensor:
    """The most by which the matmul of changed operands differs, summed in float32."""
    wide_a, wide_b = a.abs() + a_error, b.abs() + b_error
    accumulated = (a.shape[1] + 2) * FLOAT32 * (wide_a @ wide_b)
    return a.abs() @ b_error + a_error @ b.abs() + a_error @ b_error + accumulated


def check(got: Tensor, exact: Tensor, most: Tensor) -> None:
    worst = ((got.double() - exact).abs() / most).max().item()
    assert worst <= 1
    assert worst > 1e-3, "the limit is so wide that it says nothing"


@pytest.mark.parametrize("scaling", SCALINGS)
def test_against_float64(scaling: str) -> None:
    given = case()
    result, for_x, for_weight, for_bias = run(scaling, given, torch.float32)
    x, weight, bias, gradient = (t.detach().double() for t in given)
    # With scales for rows or blocks, small numbers are relative to less than this.
    x_error = error_of(x, E4M3_ERROR, E4M3_LEAST, x.abs().amax())
    weight_error = error_of(weight, E4M3_ERROR, E4M3_LEAST, weight.abs().amax())
    # Gradients by rows have the scales of the other operand inside: up to 2**8 apart here.
    gradient_error = error_of(gradient, E5M2_ERROR, 2**8 * E5M2_LEAST, gradient.abs().amax())
    check(result, x @ weight.t() + bias, limit(x, x_error, weight.t(), weight_error.t()))
    check(for_x, gradient @ weight, limit(gradient, gradient_error, weight, weight_error))
    expected = limit(gradient.t(), gradient_error.t(), x, x_error)
    check(for_weight, gradient.t() @ x, expected)
    most = (ROWS * FLOAT32 * gradient.abs()).sum(0)
    assert bool(((for_bias.double() - gradient.sum(0)).abs() <= most).all())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_halves_are_float32_rounded_once(scaling: str) -> None:
    """Parameters and activations in bfloat16: gradients are in bfloat16 too."""
    half, wide = case(torch.bfloat16), case(torch.bfloat16)
    wide = Case(*(t.detach().float().requires_grad_() for t in wide[:3]), wide.gradient.float())
    got, expected = run(scaling, half, torch.bfloat16), run(scaling, wide, torch.float32)
    for mine, theirs in zip(got[:3], expected[:3], strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine, theirs.bfloat16())


def test_rows_need_not_share_a_scale() -> None:
    """A row far below the largest one is lost by one scale, and kept by its own."""
    torch.manual_seed(0)
    x = torch.randn(2, INNER)
    x[1] *= 2.0**-22
    weight = torch.randn(OUTER, INNER)
    exact = x.double() @ weight.double().t()
    errors = {}
    for scaling in WAYS:
        got = fp8_linear(x, weight, None, scaling, torch.float32)
        errors[scaling] = float((got[1] - exact[1]).norm() / exact[1].norm())
    assert errors["tensor"] > 0.5
    assert max(errors["row"], errors["block"]) < 0.1


class CastsToFp8(TorchDispatchMode):
    """The shapes that are cast to each FP8 dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[torch.dtype, list[int]] = {E4M3: [], E5M2: []}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if func is torch.ops.aten._to_copy.default and dtype in self.seen:
            self.seen[dtype].append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_operands_are_quantised_once(scaling: str) -> None:
    with CastsToFp8() as casts:
        run(scaling, case(), torch.bfloat16)
    assert casts.seen[E4M3] == [ROWS * INNER, OUTER * INNER]
    # Sums over other dimensions need other scales, and these are for rows.
    assert casts.seen[E5M2] == [ROWS * OUTER] * (2 if scaling == "row" else 1)


def test_only_fp8_values_are_saved() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fp8_linear(*case()[:3], "row", torch.bfloat16)
    large = [t for t in saved if t.numel() > ROWS + OUTER]
    assert [t.dtype for t in large] == [E4M3, E4M3]


@pytest.mark.parametrize("scaling", WAYS)
def test_shapes(scaling: str) -> None:
    given = case()
    flat = fp8_linear(*given[:3], scaling, torch.float32)
    x = given.x.reshape(2, 3, ROWS // 6, INNER)
    deep = fp8_linear(x, given.weight, given.bias, scaling, torch.float32)
    assert deep.shape == (2, 3, ROWS // 6, OUTER)
    assert torch.equal(deep.reshape(ROWS, OUTER), flat)
    one = fp8_linear(given.x[0], given.weight, given.bias, scaling, torch.float32)
    assert one.shape == (OUTER,)


def test_frozen_weights_have_no_gradient() -> None:
    given = case()
    weight = given.weight.detach()
    fp8_linear(given.x, weight, None, "row", torch.float32).sum().backward()
    assert weight.grad is None and given.x.grad is not None


def test_second_derivatives_are_refused() -> None:
    given = case()
    result = fp8_linear(*given[:3], "tensor", torch.float32).square().sum()
    (first,) = torch.autograd.grad(result, given.x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_backward_inside_of_autocast_is_the_same() -> None:
    inside, outside = case(), case()
    loss = fp8_linear(*inside[:3], "row", torch.bfloat16).float().square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    fp8_linear(*outside[:3], "row", torch.bfloat16).float().square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inside[:3], outside[:3], strict=True))


def test_histories_are_kept_and_used() -> None:
    given = case()
    operands, gradients = histories("delayed")
    fp8_linear(*given[:3], "delayed", torch.float32, operands, gradients).backward(given.gradient)
    x, weight, _, gradient = (t.detach().abs().amax() for t in given)
    assert operands[:, 0].tolist() == [float(x), float(weight)]
    assert gradients[0] == gradient
    with torch.no_grad():  # evaluation leaves them unchanged
        fp8_linear(2 * given.x, *given[1:3], "delayed", torch.float32, operands, gradients)
    assert operands[:, 0].tolist() == [float(x), float(weight)]
