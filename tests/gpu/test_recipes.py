"""FP8 recipes on a GPU against their emulation on the CPU, and compiled against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import perfuse
from perfuse.errors import Fp8Unavailable
from perfuse.precision import LayerRules, Recipe, Scaling, prepare
from perfuse.precision.fp8_linear import fp8_linear
from perfuse.precision.fp8_region import check_device
from tests.harness.fp8_training import LIMITS, final_loss

SHAPES = [(64, 256, 128), (33, 256, 384), (1, 512, 256)]
SCALINGS = [str(scaling) for scaling in Scaling]
BF16 = torch.bfloat16
# FP8 units add up to 128 products with 14 bits, and the sums of those in float32.
UNIT_ERROR = 2.0**-12


@pytest.fixture(autouse=True)
def needs_fp8(device: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        check_device(device)
    except Fp8Unavailable as error:
        pytest.skip(error.message)


def operands(rows: int, inner: int, outer: int) -> list[Tensor]:
    x = torch.randn(rows, inner) * torch.exp2(torch.randint(-3, 3, (rows, 1)).float())
    return [x, torch.randn(outer, inner) / 16, torch.randn(outer), torch.randn(rows, outer) / 64]


def run(scaling: str, given: list[Tensor], device: str) -> list[Tensor]:
    x, weight, bias = (t.detach().to(device).requires_grad_() for t in given[:3])
    state = [torch.zeros(2, 4), torch.zeros(4)] if scaling == "delayed" else []
    histories = [t.to(device) for t in state]
    result = fp8_linear(x, weight, bias, scaling, BF16, *histories)
    result.backward(given[3].to(device, BF16))
    made = [result.detach(), x.grad, weight.grad, bias.grad, *histories]
    return [t.cpu().float() for t in made if t is not None]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_matmuls_are_those_of_the_cpu(
    scaling: str, shape: tuple[int, int, int], device: str
) -> None:
    given = operands(*shape)
    x, weight, bias, gradient = (t.abs() for t in given)
    sums = [x @ weight.t() + bias, gradient @ weight, gradient.t() @ x, gradient.sum(0)]
    got, expected = run(scaling, given, device), run(scaling, given, "cpu")
    for mine, theirs, size in zip(got[:4], expected[:4], sums, strict=True):
        limit = 2.0**-7 * theirs.abs() + UNIT_ERROR * 4 * size  # two roundings to bfloat16
        assert bool(((mine - theirs).abs() <= limit).all())
    for mine, theirs in zip(got[4:], expected[4:], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_as_eager(scaling: str, device: str) -> None:
    rules = LayerRules(min_features=16, keeps_head=False)
    recipe = Recipe(Scaling(scaling), layers=rules)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(device)
    layers = prepare(model, recipe)
    x = torch.randn(128, 256, device=device)
    eager = perfuse.autocast(device, torch.float8_e4m3fn, recipe=layers)(model.forward)
    expected = step(model, eager, x)
    for buffer in model.buffers():
        buffer.zero_()
    got = step(model, perfuse.compile(model, precision=recipe, fullgraph=True), x)
    for mine, theirs in zip(got, expected, strict=True):
        # A rounding of gelu to bfloat16 that differs may become one of FP8.
        assert (mine - theirs).norm() <= 2.0**-6 * theirs.norm()


def step(model: nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    result = call(x)
    result.float().square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().float().clone() for t in (result, *gradients)]


@pytest.mark.parametrize("precision", LIMITS)
def test_a_training(precision: str, device: str) -> None:
    expected = final_loss("mlp", None, 100, device=device, compiles=False)
    got = final_loss("mlp", precision, 100, device=device)
    assert abs(got - expected) <= LIMITS[precision] * expected
