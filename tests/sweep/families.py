"""Whose software the sweep runs: names, variants, and how a subject is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.sweep import (
    diffusers_models,
    einops_models,
    idioms,
    modules,
    optimisers,
    practices,
    refusals,
    small_packages,
    timm_models,
    torchvision_models,
    transformers_models,
)
from tests.sweep.subject import Subject

EVAL_AND_TRAIN = ("eval", "train")
IMAGES = (*EVAL_AND_TRAIN, "eval_channels_last", "train_channels_last")


@dataclass(frozen=True, slots=True)
class Family:
    """`names` raises ImportError where the software is missing; `make` raises `NotMade`."""

    names: Callable[[], list[str]]
    make: Callable[[str, str], Subject]
    variants: tuple[str, ...]

    def rows(self, family: str) -> list[str]:
        return [f"{family}/{name}/{variant}" for name in self.names() for variant in self.variants]


FAMILIES = {
    "modules": Family(modules.names, modules.make, EVAL_AND_TRAIN),
    "optimisers": Family(optimisers.names, optimisers.make, ("float_lr", "tensor_lr")),
    "idioms": Family(idioms.names, idioms.make, (*EVAL_AND_TRAIN, "sizes")),
    "practices": Family(practices.names, practices.make, ("static", "dynamic")),
    "refusals": Family(refusals.names, refusals.make, ("static", "dynamic")),
    "einops": Family(einops_models.names, einops_models.make, EVAL_AND_TRAIN),
    "packages": Family(small_packages.names, small_packages.make, EVAL_AND_TRAIN),
    "timm": Family(timm_models.names, timm_models.make, IMAGES),
    "torchvision": Family(torchvision_models.names, torchvision_models.make, IMAGES),
    "diffusers": Family(diffusers_models.names, diffusers_models.make, EVAL_AND_TRAIN),
    "transformers": Family(transformers_models.names, transformers_models.make, ("eval",)),
}
