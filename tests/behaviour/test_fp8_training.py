"""Training in lower precisions ends at the loss of float32."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.harness.fp8_training import LIMITS, TRAININGS, final_loss

SHORT, LONG = 15, 200


@cache
def float32_loss(name: str, num_steps: int) -> float:
    return final_loss(name, None, num_steps, compiles=False)


def check(name: str, precision: str, num_steps: int, compiles: bool) -> None:
    expected = float32_loss(name, num_steps)
    got = final_loss(name, precision, num_steps, compiles=compiles)
    difference = abs(got - expected) / expected  # NaN compares as false
    print(f"{name} {precision}: {got:.5f} in float32 {expected:.5f}, {difference:.3%}")
    assert difference <= LIMITS[precision]


@pytest.mark.parametrize("precision", LIMITS)
def test_a_short_training(precision: str) -> None:
    check("mlp", precision, SHORT, compiles=False)


@pytest.mark.slow
@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_of_200_steps(name: str, precision: str) -> None:
    torch._dynamo.reset()
    check(name, precision, LONG, compiles=True)
