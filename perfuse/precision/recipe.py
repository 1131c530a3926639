"""`Recipe`: how linear layers run in FP8, as data; the names of recipes and of precisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

import torch

from perfuse.errors import ConfigError, UnknownOption
from perfuse.precision.layer_rules import LayerRules

BASE_DTYPES = (torch.bfloat16, torch.float16)


class Scaling(StrEnum):
    """The part of a tensor that has a scale of its own, and when that is computed."""

    TENSOR = "tensor"  # the tensor, from its values
    ROW = "row"  # each row of the operands of a matmul, from its values
    BLOCK = "block"  # 1x128 elements of activations and gradients, 128x128 of weights
    DELAYED = "delayed"  # the tensor, from the values of earlier steps


BLOCK_SIZE = 128


@dataclass(frozen=True, slots=True)
class Recipe:
    """How linear layers run in FP8, and which of them."""

    scaling: Scaling
    dtype: torch.dtype = torch.bfloat16  # of results of FP8 layers, and of the rest by autocast
    layers: LayerRules = field(default_factory=LayerRules)
    history_length: int = 16  # steps that delayed scaling looks back

    def __post_init__(self) -> None:
        if self.scaling not in list(Scaling):
            raise UnknownOption(str(self.scaling), list(Scaling), what="recipe")
        if self.dtype not in BASE_DTYPES:
            raise ConfigError(
                f"a recipe cannot use {self.dtype} for the layers that are not in FP8",
                hint="choose torch.bfloat16 or torch.float16.",
            )
        if self.history_length < 1:
            raise ConfigError("history_length is less than 1", hint="16 is the default.")

    @property
    def rules(self) -> LayerRules:
        """The rules for layers, with what the scaling itself needs."""
        if self.scaling != Scaling.BLOCK:
            return self.layers
        return replace(self.layers, multiple=max(self.layers.multiple, BLOCK_SIZE))


RECIPES: Mapping[str, Recipe] = MappingProxyType({str(s): Recipe(s) for s in Scaling})

# What `perfuse.compile` takes: the dtype of autocast, or a recipe.
PRECISIONS: Mapping[str, torch.dtype | Recipe] = MappingProxyType(
    {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        **{f"fp8-{name}": recipe for name, recipe in RECIPES.items()},
    }
)


def recipe_of(recipe: str | Recipe) -> Recipe:
    """The recipe of a name."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise UnknownOption(str(recipe), RECIPES, what="recipe")
    return RECIPES[recipe]


def precision_of(precision: str | Recipe) -> torch.dtype | Recipe:
    """The dtype or recipe of the name of a precision."""
    if isinstance(precision, Recipe):
        return precision
    if precision not in PRECISIONS:
        raise UnknownOption(str(precision), PRECISIONS, what="precision")
    return PRECISIONS[precision]
