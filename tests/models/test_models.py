"""Real architectures with random weights, forward and a training step."""

from __future__ import annotations

import pytest

from tests.models.check import check_model
from tests.models.zoo import FURTHER, NAMED, Architecture

ROWS = [
    *(pytest.param(a, id=a.name) for a in NAMED),
    *(pytest.param(a, id=a.name, marks=pytest.mark.slow) for a in FURTHER),
]


@pytest.mark.parametrize("train", (False, True), ids=("forward", "train"))
@pytest.mark.parametrize("architecture", ROWS)
def test_matches_eager(architecture: Architecture, train: bool) -> None:
    report = check_model(architecture, train=train)
    assert not report.problems, "\n".join(report.problems)
    assert report.num_graphs <= report.num_graphs_eager, "more graphs than Dynamo alone makes"
