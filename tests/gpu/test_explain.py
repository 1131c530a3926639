"""Explanations of programs on a device: the screen fits and names the device and its settings."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import perfuse
from perfuse.report.screen import HEIGHT, WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.mlp(self.norm(x)))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_training_step(device: str, mode: str) -> None:
    model = nn.Sequential(Block(), Block()).to(device)
    fast = perfuse.compile(model, mode=mode)
    explanation = perfuse.explain(fast, torch.randn(512, 64, device=device))
    text = str(explanation)
    assert len(text.splitlines()) <= HEIGHT and max(map(len, text.splitlines())) <= WIDTH, text
    assert device == "cpu" or re.search(r"for (cuda sm_|hip gfx)\w+", text), text
    assert ("cudagraphs=True" in text) == (mode == "reduce-overhead"), text
    assert re.search(r"^      [01]\.norm", text, re.MULTILINE), text
    assert "Backward:" in text and "matmul" in text
    assert device == "cpu" or "@triton.jit" in explanation.stage("sources")
