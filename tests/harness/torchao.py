"""torchao, which may not be there: `pip install --no-deps --target .sweep_deps torchao`."""

from __future__ import annotations

import copy
import importlib.util
import sys
from typing import Any

import pytest
from torch import nn

from tests.harness.devices import ROOT

for _folder in (".sweep_deps", ".device_torchao"):
    if (ROOT / _folder / "torchao").is_dir() and str(ROOT / _folder) not in sys.path:
        sys.path.append(str(ROOT / _folder))

IS_THERE = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not IS_THERE, reason="torchao is not installed")


def with_recipe(module: nn.Module, recipe: str) -> nn.Module:
    """A copy whose linear layers train in float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    converted: nn.Module = convert_to_float8_training(copy.deepcopy(module), config=config)
    return converted


def quantised(module: nn.Module, config: str, **given: Any) -> nn.Module:
    """A copy whose weights are quantised for inference; `config` is a class of torchao's."""
    from torchao import quantization

    module = copy.deepcopy(module)
    quantization.quantize_(module, getattr(quantization, config)(**given))
    return module
