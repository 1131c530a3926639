"""A precision for a whole model: every call of the compiled model runs inside of its region."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from perfuse.precision.autocast import autocast
from perfuse.precision.conversion import Conversion, prepare
from perfuse.precision.fp8_linear import allow_in_graph
from perfuse.precision.fp8_region import check_state
from perfuse.precision.recipe import Recipe, precision_of

_MARK = "perfuse_precision"  # the attribute of a function that runs in a precision


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A model or function, and the precision that its calls run in."""

    model: Any
    way: torch.dtype | Recipe | Conversion

    @staticmethod
    def of(model: Any, precision: str | Recipe) -> WholeModel:
        """The precision of this name for a model; chooses its FP8 layers, if any."""
        way = precision_of(precision)
        if isinstance(way, torch.dtype):
            return WholeModel(model, way)
        allow_in_graph()
        if isinstance(model, nn.Module):
            return WholeModel(model, prepare(model, way))
        check_state(way)
        return WholeModel(model, way)

    @property
    def conversion(self) -> Conversion | None:
        """The layers in FP8; None for other precisions, and for functions."""
        return self.way if isinstance(self.way, Conversion) else None

    def of_copy(self, model: Any) -> WholeModel:
        """The same precision for a copy of the model."""
        found = self.conversion
        return WholeModel(model, self.way if found is None else prepare(model, found.recipe))

    def region(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The region of one call, on the device of the model or of the first tensor."""
        weight = next(self.model.parameters(), None) if isinstance(self.model, nn.Module) else None
        device_type = _device_type([weight, args, kwargs]) or "cpu"
        if isinstance(self.way, torch.dtype):
            return autocast(device_type, self.way)
        return autocast(device_type, torch.float8_e4m3fn, recipe=self.way)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function inside of the region."""

        @functools.wraps(function, updated=())  # its attributes would have Dynamo bypass the region
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.region(args, kwargs):
                return function(*args, **kwargs)

        setattr(run, _MARK, self)
        return run

    def applied_to(self, compiled: Any) -> Any:
        """A compiled model or function whose calls run in this precision."""
        if not isinstance(compiled, nn.Module):
            return self.around(compiled)
        compiled.forward = self.around(compiled.forward)
        return compiled


def whole_model_of(function: Any) -> WholeModel | None:
    """The precision that a compiled model or function was given; None if it has none."""
    is_module = isinstance(function, nn.Module)
    found: WholeModel | None = getattr(function.forward if is_module else function, _MARK, None)
    return found


def without_region(function: Any) -> Any:
    """The compiled function inside of the region that it was given; a module as it is."""
    is_given = hasattr(function, _MARK) and not isinstance(function, nn.Module)
    return function.__wrapped__ if is_given else function


def _device_type(value: Any) -> str | None:
    """The kind of device of the first tensor in nested arguments; Dynamo may have to trace this."""
    if isinstance(value, Tensor):
        return value.device.type
    inner = list(value.values()) if isinstance(value, dict) else value
    if isinstance(inner, list | tuple):
        for each in inner:
            found = _device_type(each)
            if found is not None:
                return found
    return None
