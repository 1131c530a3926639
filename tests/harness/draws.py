"""Eager's error drawn again: the same model, its parameters moved by one rounding."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.harness.compare import moved


def moved_model(model: nn.Module, direction: str) -> nn.Module:
    """A copy whose parameters are moved, and rounded to their dtype again."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.is_floating_point():
                eps = torch.finfo(parameter.dtype).eps
                parameter.copy_(moved(parameter, eps, direction))
    return other
