"""Triton kernels without a GPU: their values in Triton's interpreter, against eager and float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import perfuse
from perfuse.testing import fresh_cache
from tests.behaviour.row import Behaviour
from tests.gpu.programs import SMALL
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
