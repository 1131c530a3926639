"""Quantising to eight bits: eager's bits, division included, and the number of kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from perfuse import config
from perfuse.codegen.triton.unit import generate_triton
from perfuse.context import Context
from perfuse.testing import fresh_cache
from tests.harness.backend import compiled
from tests.harness.float8 import (
    QUANTISERS,
    Quantiser,
    by_axis,
    check_quantised,
    gated_in_blocks,
    halves,
)
from tests.unit.planning import gpu_context, plans_of


@pytest.fixture(autouse=True)
def new_dynamo() -> None:
    torch._dynamo.reset()


def all_of(inputs: list[list[Tensor]]) -> list[Any]:
    return [row.function(*given) for row, given in zip(QUANTISERS, inputs, strict=True)]


def test_every_quantiser_has_eagers_bits() -> None:
    """All in one program, so that the compiler runs once."""
    mine, theirs = ([row.inputs() for row in QUANTISERS] for _ in range(2))
    with config.patch({"cpu.opt_level": 1}):
        got = compiled(all_of)(mine)
    eager = all_of(theirs)
    for row, *results in zip(QUANTISERS, got, eager, mine, theirs, strict=True):
        check_quantised(row, *results)


CPU, SM_90 = Context.default(), gpu_context("sm_90")


@pytest.mark.parametrize("row", QUANTISERS, ids=str)
def test_number_of_kernels(row: Quantiser) -> None:
    for context in (CPU, SM_90):
        (plan,) = plans_of(row.function, *row.inputs(), context=context)
        assert len(plan.kernels) == row.num_kernels, str(plan)


def divisions(row: Quantiser, context: Context) -> str:
    (plan,) = plans_of(row.function, *row.inputs(), context=context)
    return generate_triton(plan, context).text


@pytest.mark.parametrize("gpu", ["sm_90", "sm_80", "gfx942"])
def test_gpus_divide_exactly_before_they_round_to_eight_bits(gpu: str) -> None:
    """Also in the kernel that computes the scale for another one."""
    context = gpu_context(gpu)
    for row in QUANTISERS:
        if "scale" in row.name or "blocks" in row.name:
            text = divisions(row, context)
            assert "tl.div_rn(" in text, f"{row}: {text}"
            assert " / " not in text.partition("def kernel0")[2], f"{row}: {text}"


def test_halves_without_eight_bits_are_divided_by_approximation() -> None:
    x = halves(64, 128)
    (plan,) = plans_of(lambda x: x / x.sum(-1, keepdim=True), x, context=SM_90)
    assert "tl.div_rn(" not in generate_triton(plan, SM_90).text


def some(x: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    return (*by_axis(x, -1), *by_axis(x, 0), *gated_in_blocks(x, gate))


def test_kernels_of_gpus_have_eagers_bits() -> None:
    """In Triton's interpreter, whose quotients and exponentials are rounded as eager's."""
    x, gate = halves(16, 128), halves(16, 128, seed=1)
    with fresh_cache(), config.patch({"gpu.interpret": True}):
        got = compiled(some)(x, gate)
    row = Quantiser("interpreted", some, lambda: [x, gate])
    check_quantised(row, got, some(x, gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scaled_sums_are_rounded_once_as_by_eager(dtype: torch.dtype) -> None:
    """As torchvision blends an image with its grey one: many results are close to whole numbers."""

    def blended(image: Tensor, grey: Tensor) -> list[Tensor]:
        wide, other = image.to(dtype) * 1.4, grey.to(dtype)
        sums = [wide.add(other, alpha=-0.4), wide.sub(other, alpha=0.4)]
        return [*sums, *(x.clamp(0, 255).to(torch.uint8) for x in sums)]

    image = torch.arange(256, dtype=torch.uint8).repeat(3, 7, 1)
    grey = image[:1].roll(3, 1)
    for got, eager in zip(compiled(blended)(image, grey), blended(image, grey), strict=True):
        assert torch.equal(got, eager)
