"""The limits that results are held to: derived, and neither below a rounding nor far above it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.harness.compare import norm_complaints

LOSS = 10.8281
MATRIX = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)


def neighbour(x: Tensor, steps: int) -> Tensor:
    """The number so many representable ones further from zero."""
    return (x.view(torch.int16) + steps).view(torch.bfloat16)


@pytest.mark.parametrize("value", [1.0, 1.99, LOSS, 15.97, 1e-3])
def test_rounding_to_the_result_s_own_type_is_always_allowed(value: float) -> None:
    """Even where eager happens to be exact: the exact value is on eager's own grid."""
    exact = torch.tensor(value).bfloat16()
    assert not norm_complaints([neighbour(exact, 1)], [exact], [exact.double()])
    half_way = (exact.double() + neighbour(exact, 1).double()) / 2
    for rounded in (exact, neighbour(exact, 1)):
        assert not norm_complaints([rounded], [exact], [half_way])
    assert norm_complaints([neighbour(exact, 3)], [exact], [exact.double()])


def results(loss_error: float, matrix_error: float = 0.0) -> list[Tensor]:
    """A float32 loss beside a bfloat16 gradient, each off by so much."""
    loss = torch.tensor(LOSS, dtype=torch.float64) + loss_error
    return [loss.float(), (MATRIX * (1 + matrix_error)).bfloat16()]


EXACT = [torch.tensor(LOSS, dtype=torch.float64), MATRIX]
# Twice eager's error of 3.3e-5, and a few times what one rounding of the arguments changes.
MOVED = [[torch.tensor(LOSS + by, dtype=torch.float64), 1.1 * MATRIX] for by in (2e-4, -1e-4)]


def test_a_finer_result_may_move_as_the_roundings_on_the_way_move_it() -> None:
    eager = results(3.3e-5)
    assert norm_complaints(results(1.34e-4), eager, EXACT), "eager's one draw alone"
    assert not norm_complaints(results(1.34e-4), eager, EXACT, MOVED)
    assert not norm_complaints(results(1.2e-3), eager, EXACT, MOVED)
    assert norm_complaints(results(1.4e-3), eager, EXACT, MOVED)


def test_results_as_coarse_as_what_they_come_from_are_held_to_eager_s_error() -> None:
    eager = results(0.0)
    assert not norm_complaints(results(0.0, 0.005), eager, EXACT, MOVED)
    assert norm_complaints(results(0.0, 0.03), eager, EXACT, MOVED)
