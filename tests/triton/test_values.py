"""Triton kernels without a GPU: their values in Triton's interpreter, against eager and float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import perfuse
from perfuse.testing import fresh_cache
from tests.behaviour.row import Behaviour
from tests.gpu.programs import SMALL
from tests.harness.compare import assert_as_good_as_eager
from tests.random_programs.check import check_program
from tests.random_programs.generate import from_seed

BACKEND = "perfuse"
NUM_SEEDS = 20


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with fresh_cache(), perfuse.config.patch({"gpu.interpret": True, "verify": True}):
        yield


@pytest.mark.parametrize("program", SMALL, ids=str)
def test_matches_eager(program: Behaviour) -> None:
    program.check("cpu", BACKEND)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_program_matches_eager(seed: int) -> None:
    program = from_seed(seed)
    verdict = check_program(program, BACKEND)
    assert verdict.status in ("pass", "skip"), f"{verdict.message}\n\n{program.standalone()}"


def test_memory_is_taken_over_in_the_shape_it_was_made() -> None:
    """A result may be the tensor of a temporary that was itself another's, of another shape."""

    def function(x: Tensor, mask: Tensor, rows: Tensor) -> list[Tensor]:
        return [torch.masked.var(x, mask=chosen) for chosen in (None, mask, rows)]

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 5, 5, generator=generator)
    masks = x > -0.5, x[..., :1] > -0.5
    torch._dynamo.reset()
    got = torch.compile(function, backend=BACKEND, dynamic=False)(x, *masks)
    assert [t.shape for t in got] == [torch.Size()] * 3
    assert_as_good_as_eager(got, function(x, *masks), function(x.double(), *masks))
