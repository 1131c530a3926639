"""Real architectures with random weights, forward and a training step."""

from __future__ import annotations

import pytest

from tests.models.check import check_model
from tests.models.zoo import FURTHER, NAMED, Architecture

# Their forward pass has the layers of the others', and is seen in their training step as well.
SEEN_IN_TRAINING = ("gpt2", "vit", "whisper_encoder", "convnext", "mobilebert")
MODES = {"forward": False, "train": True}


def is_slow(architecture: Architecture, mode: str) -> bool:
    return architecture in FURTHER or (mode == "forward" and architecture.name in SEEN_IN_TRAINING)


ROWS = [
    pytest.param(
        *(architecture, train),
        id=f"{architecture.name}-{mode}",
        marks=[pytest.mark.slow] if is_slow(architecture, mode) else [],
    )
    for architecture in (*NAMED, *FURTHER)
    for mode, train in MODES.items()
]


@pytest.mark.parametrize(("architecture", "train"), ROWS)
def test_matches_eager(architecture: Architecture, train: bool) -> None:
    report = check_model(architecture, train=train)
    assert not report.problems, "\n".join(report.problems)
    assert report.num_graphs <= report.num_graphs_eager, "more graphs than Dynamo alone makes"
