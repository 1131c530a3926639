"""Architectures of timm: the smallest model of each of its modules, with few blocks and pixels."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.sweep.packages import import_torchvision
from tests.sweep.subject import (
    NotMade,
    Subject,
    accepted,
    deterministic,
    noise,
    shallower,
    stirred,
    variant_of,
    why,
)

MAX_PARAMETERS = 40_000_000
BATCH = 4
SIDES = (64, 96, 128, 160, 224, 240, 256)
# Names that makers give to their smallest models, the smallest first.
SMALLEST = (
    r"^test_",
    r"atto|zepto",
    r"femto",
    r"pico",
    r"nano",
    r"xx_?s|xxtiny|xx_?small|_050$|_35$",
    r"_xs|x_?small|_t0$|_b0|_m0|_s0|002$",
    r"tiny|_ti_|_t8|_5m|9_240|14d|17$|18$|26t$|121$",
    r"small|_s$|_s1|_s_|_m1|_t1|_l1|_d1|s24_224|34$|42$|128s",
    r"_m$|26|_b1",
    r"base|_m",
)
# Fewer blocks, by the name each family gives to their number.
FEWER: tuple[dict[str, Any], ...] = (
    {"depths": (1, 1, 1, 1)},
    {"depths": (1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
    {"depth": 2},
    {"depth": (1, 1, 1)},
    {"depth": (1, 1, 1, 1)},
    {"num_blocks": (1, 1, 1, 1)},
    {"depth_multiplier": 0.1},
    {},
)
# Models whose sizes go together in ways that names do not tell.
LEFT_OUT = {
    "naflexvit": "takes images as patches with positions",
    "nasnet": "its only model has 88 million parameters",
    "pnasnet": "its only model has 86 million parameters",
    "gemma4_vit": "eager gives no finite number with random weights",
    "inception_resnet_v2": "its only model has 55 million parameters",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    settings: dict[str, Any]
    side: int
    is_shallow: bool  # whether blocks that repeat are left out

    def __str__(self) -> str:
        return f"{self.settings} {self.side}{' no block twice' if self.is_shallow else ''}"


def names() -> list[str]:
    import_torchvision()
    import timm

    return sorted(smallest(timm, module) for module in timm.list_modules() if known(timm, module))


def known(timm: Any, module: str) -> bool:
    return bool(timm.list_models(module=module))


def smallest(timm: Any, module: str) -> str:
    def rank(name: str) -> tuple[int, int, str]:
        ranks = (i for i, pattern in enumerate(SMALLEST) if re.search(pattern, name))
        return next(ranks, len(SMALLEST)), len(name), name

    return min(timm.list_models(module=module), key=rank)


def make(name: str, variant: str) -> Subject:
    import_torchvision()
    import timm

    module = timm.models._registry._model_to_module[name]
    if module in LEFT_OUT:
        raise NotMade(LEFT_OUT[module])
    recipe = recipe_of(name)
    if isinstance(recipe, str):
        raise NotMade(recipe)
    return variant_of(subject_of(name, recipe), variant)


@functools.cache
def recipe_of(name: str) -> Recipe | str:
    """How the model is made small: found once for all its variants. Or why it cannot be."""
    reasons = []
    for settings in FEWER:
        try:
            return smallest_input(name, settings)
        except Exception as error:  # not every family takes these settings
            reasons.append(f"{settings}: {why(error)}")
    return "; ".join(reasons[-2:])


def smallest_input(name: str, settings: dict[str, Any]) -> Recipe:
    """The smallest image that eager takes, in training too; no block twice if that will do."""
    error: Exception = NotMade("no size of image fits")
    for side in SIDES:
        for sized in ({"img_size": side}, {}):
            for is_shallow in (True, False):
                recipe = Recipe(settings | sized, side, is_shallow)
                try:
                    accepted(subject_of(name, recipe).training())
                    return recipe
                except Exception as refused:
                    error = refused
                    if isinstance(refused, TypeError):
                        break
            if not isinstance(error, TypeError):
                break
            if not sized:
                raise error
    raise error


def subject_of(name: str, recipe: Recipe, batch: int = BATCH) -> Subject:
    image = noise(batch, 3, recipe.side, recipe.side)
    return Subject(built(name, recipe), ((image,), {}), str(recipe))


def built(name: str, recipe: Recipe) -> nn.Module:
    with torch.device("meta"):
        size = num_parameters(name, recipe)
    if size > MAX_PARAMETERS:
        raise NotMade(f"{size:,} parameters")
    torch.manual_seed(0)
    return stirred(created(name, recipe)).eval()


def created(name: str, recipe: Recipe) -> nn.Module:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=10, **recipe.settings)
    return shallower(deterministic(model)) if recipe.is_shallow else deterministic(model)


def num_parameters(name: str, recipe: Recipe) -> int:
    try:
        model = created(name, recipe)
    except (RuntimeError, NotImplementedError):
        return 0  # not every model can be made without memory
    return sum(p.numel() for p in model.parameters())
