"""The sweep's own parts: models made small by names, fed by signature, and judged."""

from __future__ import annotations

import re

import pytest
import torch

from tests.models import sweep_worker
from tests.models.sweep import is_ours, summary
from tests.models.tiny import FIRST_SPECIAL, RECIPES, Made, NotMade, make, shrunk


@pytest.mark.parametrize(
    ("model_type", "names"),
    (
        ("bert", {"input_ids", "attention_mask"}),
        ("t5", {"input_ids", "attention_mask", "decoder_input_ids"}),
        ("vit", {"pixel_values"}),
        ("clip", {"input_ids", "attention_mask", "pixel_values"}),
        ("hubert", {"input_values"}),
    ),
)
def test_types_of_all_kinds_are_made_small(model_type: str, names: set[str]) -> None:
    made = make(model_type)
    assert set(made.inputs) == names
    assert sum(p.numel() for p in made.model.parameters()) < 1_000_000


def test_settings_become_smaller_by_their_names() -> None:
    settings = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "image_token_id": 32_000,
        "depths": [3, 4, 6, 3],
        "kinds": ["a"] * 12,
        "vision_config": {"model_type": "vit", "patch_size": 16},
    }
    found = shrunk(settings, RECIPES["tiny"])
    assert (found["hidden_size"], found["num_hidden_layers"], found["depths"]) == (32, 2, [1] * 4)
    assert found["kinds"] == ["a", "a"] and found["image_token_id"] >= FIRST_SPECIAL
    assert found["vision_config"] == {"model_type": "vit", "patch_size": 8}


def test_a_type_that_cannot_be_made_says_why() -> None:
    with pytest.raises(NotMade, match=re.escape("tiny: ")):
        make("timm_backbone")


def test_a_wrong_number_is_found_and_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the backend under test gives a result with one element moved."""
    real = sweep_worker.compiled_by

    def broken(backend: str, *rest: object) -> tuple[list[torch.Tensor], int]:
        got, num_graphs = real(backend, *rest)  # type: ignore[arg-type]
        if backend == "eager":
            got[0].view(-1)[7] += 1e-4
        return got, num_graphs

    monkeypatch.setattr(sweep_worker, "compiled_by", broken)
    monkeypatch.setattr(sweep_worker, "PEER", "aot_eager")
    result = sweep_worker.swept("bert", "eager")
    assert (result["status"], result["whose"]) == ("wrong", "ours") and is_ours(result)
    assert summary({"bert": result}, 3).startswith("1 of 3 types: 1 wrong; ours 1")


def test_a_model_that_insists_on_float32_is_held_against_a_stand_in() -> None:
    class Insists(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": self.inner(x.float() * torch.ones(16))}

    torch.manual_seed(0)
    made = Made(Insists(), {"x": torch.randn(4, 16)}, "tiny")
    eager = sweep_worker.evaluate(made.model, made.inputs)
    assert not sweep_worker.complaints_of(made, eager, eager)
    assert sweep_worker.complaints_of(made, eager, [eager[0] + 1e-4])
