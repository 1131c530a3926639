"""Models of transformers made small by names and fed by signature."""

from __future__ import annotations

import re

import pytest

from tests.models.tiny import FIRST_SPECIAL, RECIPES, NotMade, make, shrunk


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
