"""Regions of FP8: a function mode that runs linear layers by a recipe, where autocast is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from perfuse.errors import ConfigError, Fp8Unavailable
from perfuse.precision.conversion import GRADIENT_HISTORY, OPERAND_HISTORY, Conversion
from perfuse.precision.fp8_linear import fp8_linear
from perfuse.precision.layer_rules import WEIGHT_DTYPES
from perfuse.precision.recipe import RECIPES, Recipe, Scaling, recipe_of
from perfuse.torch_compat.dynamo import left_to_python

OLDEST_GPU = (8, 9)  # compute capability of the first GPUs that multiply FP8
Fp8 = str | Recipe | Conversion  # what the argument `recipe` of a region may be


class Fp8Mode(TorchFunctionMode):
    """Runs linear layers in FP8: those of a conversion, or those whose size the rules allow."""

    def __init__(self, device_type: str, recipe: Recipe, layers: dict[int, nn.Module] | None):
        super().__init__()
        self.device_type, self.layers = device_type, layers
        self.scaling, self.dtype = str(recipe.scaling), recipe.dtype
        rules = recipe.rules
        self.min_features, self.multiple = rules.min_features, rules.multiple

    @left_to_python
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = {} if kwargs is None else kwargs
        name = getattr(func, "__name__", "")
        if name == "linear" and self.is_on():
            x, weight, bias = _linear_operands(*args, **options)
            if self.is_converted(x, weight):
                return self.linear(x, weight, weight, bias)
        elif name == "addmm" and self.layers is not None and not options and self.is_on():
            bias, x, weight = args  # of transformers' Conv1D
            if self.is_converted(x, weight):
                return self.linear(x, weight.t(), weight, bias)
        return func(*args, **options)

    def is_on(self) -> bool:
        """Whether the region is in effect: neither switched off inside, nor of another dtype."""
        device_type = self.device_type
        return (
            torch.is_autocast_enabled(device_type)
            and torch.get_autocast_dtype(device_type) == self.dtype
        )

    def is_converted(self, x: Any, weight: Any) -> bool:
        """Whether a layer runs in FP8: by the conversion, or else by its size."""
        if not self.is_convertible(x, weight):
            return False
        if self.layers is not None:
            return isinstance(weight, nn.Parameter) and id(weight) in self.layers
        sizes: tuple[int, int] = weight.shape
        return min(sizes) >= self.min_features and all(n % self.multiple == 0 for n in sizes)

    def is_convertible(self, x: Any, weight: Any) -> bool:
        """Whether these arguments can be quantised at all."""
        return (
            isinstance(x, Tensor)
            and isinstance(weight, Tensor)
            and weight.ndim == 2
            and x.dtype in WEIGHT_DTYPES
            and weight.dtype in WEIGHT_DTYPES
            and x.device.type == self.device_type
            and x.numel() > 0
        )

    def linear(self, x: Tensor, matrix: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer of this weight in FP8."""
        if self.layers is None or self.scaling != "delayed":
            return fp8_linear(x, matrix, bias, self.scaling, self.dtype)
        layer = self.layers[id(weight)]
        histories: list[Any] = [getattr(layer, OPERAND_HISTORY), getattr(layer, GRADIENT_HISTORY)]
        return fp8_linear(x, matrix, bias, self.scaling, self.dtype, *histories)


def _linear_operands(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """The arguments of `F.linear`, by its own names."""
    return input, weight, bias


def check_request(dtype: torch.dtype | None, recipe: Fp8 | None) -> None:
    """Report what cannot be a region: a dtype without its recipe, or the other way round."""
    is_fp8 = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    known = ", ".join(repr(name) for name in RECIPES)
    if is_fp8 and recipe is None:
        raise ConfigError(f"{dtype} needs a recipe", hint=f"pass recipe=, one of {known}.")
    if recipe is not None and dtype != torch.float8_e4m3fn:
        raise ConfigError(
            f"a recipe is for torch.float8_e4m3fn, not for {dtype}",
            hint="pass dtype=torch.float8_e4m3fn (gradients are torch.float8_e5m2), or no recipe.",
        )


def scaling_of(recipe: Fp8) -> Scaling:
    return (recipe.recipe if isinstance(recipe, Conversion) else recipe_of(recipe)).scaling


def check_state(recipe: Fp8) -> None:
    """Report a recipe with state for which no model was prepared."""
    if isinstance(recipe, Conversion) or scaling_of(recipe) != Scaling.DELAYED:
        return
    raise ConfigError(
        "delayed scaling keeps state in a model, and none is given",
        hint="pass recipe=perfuse.precision.prepare(model, 'delayed'), or compile the model with "
        "perfuse.compile(model, precision='fp8-delayed').",
    )


def check_device(device_type: str) -> None:
    """Report a device that cannot run FP8 recipes."""
    if device_type == "cpu":
        return
    if device_type != "cuda":
        raise Fp8Unavailable(f"no FP8 recipes for device type {device_type!r}")
    if not torch.cuda.is_available():
        raise Fp8Unavailable("no CUDA GPU is available here")
    if torch.version.hip is not None:
        raise Fp8Unavailable("FP8 recipes do not support AMD GPUs yet")
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_GPU:
        name = torch.cuda.get_device_name()
        found = ".".join(map(str, capability))
        raise Fp8Unavailable(f"{name} (compute capability {found}) has no FP8 units")


def fp8_mode(device_type: str, recipe: Fp8) -> Fp8Mode:
    """The mode of a region that is about to be entered."""
    if isinstance(recipe, Conversion):
        return Fp8Mode(device_type, recipe.recipe, recipe.by_weight())
    return Fp8Mode(device_type, recipe_of(recipe), None)


def base_dtype(recipe: Fp8) -> torch.dtype:
    """The dtype of everything in a region that does not run in FP8."""
    return recipe.recipe.dtype if isinstance(recipe, Conversion) else recipe_of(recipe).dtype
