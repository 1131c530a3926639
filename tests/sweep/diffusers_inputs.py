"""Parts of the rows of diffusers: small settings and inputs that many of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.sweep.subject import noise

Inputs = dict[str, Any]
TIME = torch.tensor([3, 700])
TEXT = noise(2, 5, 8)
LATENT = noise(2, 4, 8, 8)
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}


@dataclass(frozen=True, slots=True)
class Row:
    settings: dict[str, Any]
    inputs: Callable[[], Inputs]


def denoised(**more: Any) -> Inputs:
    return {"timestep": TIME, **more}


def image() -> Inputs:
    return {"sample": noise(2, 3, 16, 16)}


AUTOENCODER = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    **BLOCKS,
}
CONDITIONED = {
    "sample_size": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 8,
    "attention_head_dim": 4,
    **BLOCKS,
}
