"""`Conversion`: which linear layers of a model run in FP8, and why the others do not.

A model keeps its modules, parameters and names. Delayed scaling adds buffers to the layers that it
scales: the amax of earlier steps, which are saved and loaded with the model.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from perfuse.errors import ConfigError, Fp8StateWarning
from perfuse.precision.layer_rules import WEIGHT_DTYPES, LayerRules
from perfuse.precision.recipe import Recipe, Scaling, recipe_of

OPERAND_HISTORY, GRADIENT_HISTORY = "fp8_amax_history", "fp8_gradient_amax_history"
STATE_NAMES = (OPERAND_HISTORY, GRADIENT_HISTORY)


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of a model, and why it is not converted; no reason if it runs in FP8."""

    name: str
    module: nn.Module
    in_features: int
    out_features: int
    reason: str | None

    @property
    def is_converted(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        size = f"{self.in_features} -> {self.out_features}"
        return f"{self.name or '(the model)'}: {size}, {self.reason or 'FP8'}"


@dataclass(frozen=True, slots=True, repr=False)
class Conversion:
    """The linear layers of a model under a recipe: `print` it, or pass it as a recipe."""

    recipe: Recipe
    layers: tuple[Layer, ...]

    @property
    def num_converted(self) -> int:
        return sum(layer.is_converted for layer in self.layers)

    @property
    def reasons(self) -> dict[str, int]:
        """The number of layers that are not converted, by reason."""
        return dict(Counter(layer.reason for layer in self.layers if layer.reason is not None))

    def headline(self) -> str:
        """One line: how many layers run in FP8."""
        of = f"{self.num_converted} of {len(self.layers)} linear layers"
        return f"fp8-{self.recipe.scaling}: {of}, the rest in {self.recipe.dtype}"

    def __str__(self) -> str:
        return "\n".join([self.headline(), *(f"  {layer}" for layer in self.layers)])

    __repr__ = __str__

    def by_weight(self) -> dict[int, nn.Module]:
        """The layers that run in FP8, by the identity of their weight at the moment."""
        return {id(layer.module.weight): layer.module for layer in self.layers if not layer.reason}


def prepare(model: nn.Module, recipe: str | Recipe) -> Conversion:
    """Choose the layers of a model that run in FP8, and add the state that the recipe needs."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"only a module can be prepared, got {type(model).__name__}",
            hint="pass the model, or use perfuse.autocast with a recipe that keeps no state.",
        )
    chosen = recipe_of(recipe)
    layers = tuple(_layers_of(model, chosen.rules))
    conversion = Conversion(chosen, layers)
    if chosen.scaling == Scaling.DELAYED:
        for layer in layers:
            if layer.is_converted:
                _add_state(layer.module, chosen.history_length)
    else:
        _before_loading(model, _drop_state)
    return conversion


def _layers_of(model: nn.Module, rules: LayerRules) -> Iterator[Layer]:
    linear = [(name, module) for name, module in model.named_modules() if is_linear(module)]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    last = linear[-1][0] if linear else ""
    # Of a model, the last layer among its own children is its head; a part has none.
    head = last if rules.keeps_head and len(linear) > 1 and "." not in last else None
    for name, module in linear:
        weight = module.weight
        assert isinstance(weight, Tensor)
        inner, outer = weight.shape if is_stored_transposed(module) else weight.shape[::-1]
        reason = rules.reason_by_name(name, module)
        if reason is None and id(weight) in embeddings:
            reason = "shares its weight with an embedding"
        if reason is None and name == head:
            reason = "last layer of the model"
        if reason is None and weight.dtype not in WEIGHT_DTYPES:
            reason = f"weight in {weight.dtype}"
        reason = reason or rules.reason_by_size(inner, outer)
        yield Layer(name, module, inner, outer, reason)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer: PyTorch's, or the one of transformers' GPT-2."""
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, Tensor) and weight.ndim == 2
    return is_matrix and (isinstance(module, nn.Linear) or is_stored_transposed(module))


def is_stored_transposed(module: nn.Module) -> bool:
    """Whether a layer is transformers' `Conv1D`: a linear layer with its weight transposed."""
    return type(module).__name__ == "Conv1D" and not isinstance(module, nn.Conv1d)


def _add_state(module: nn.Module, length: int) -> None:
    """Add histories to a layer; it keeps those it has."""
    device: Any = getattr(module, "weight").device  # noqa: B009
    for name, shape in ((OPERAND_HISTORY, (2, length)), (GRADIENT_HISTORY, (length,))):
        present = getattr(module, name, None)
        if not isinstance(present, Tensor) or tuple(present.shape) != shape:
            module.register_buffer(name, torch.zeros(shape, device=device))
    _before_loading(module, _fill_state)


def _before_loading(module: Any, hook: Callable[..., None]) -> None:
    module.register_load_state_dict_pre_hook(hook)


def _fill_state(
    module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any, **options: Any
) -> None:
    """Start new histories where a checkpoint has none, or some of another length."""
    for name in STATE_NAMES:
        present, loaded = getattr(module, name), state.get(prefix + name)
        if loaded is None or loaded.shape != present.shape:
            state[prefix + name] = torch.zeros_like(present)
            _warn(f"no FP8 history of this length for {prefix.rstrip('.')!r} in the checkpoint: the"
                  " next step computes its scales from its own values")  # fmt: skip


def _drop_state(
    module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any, **options: Any
) -> None:
    """Leave out the histories of a checkpoint that was trained with delayed scaling."""
    present = {prefix + name for name, _ in module.named_buffers()}
    unused = [key for key in state if is_state(key) and key not in present]
    for key in unused:
        del state[key]
    if unused:
        _warn(f"{len(unused)} FP8 histories of the checkpoint are not used by this model: it has no"
              " delayed scaling")  # fmt: skip


def _warn(message: str) -> None:
    warnings.warn(message, Fp8StateWarning, stacklevel=4)


def is_state(key: str) -> bool:
    """Whether an entry of a state_dict is state of delayed scaling."""
    return key.rpartition(".")[2] in STATE_NAMES


def without_fp8_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state_dict without the state of delayed scaling, for a model that has none."""
    return {key: value for key, value in state.items() if not is_state(key)}
