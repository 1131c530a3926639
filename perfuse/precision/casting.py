"""One call by one rule: its arguments with the casts that the rule asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perfuse.errors import RefusedOp
from perfuse.precision.rules import Rule


def call_by_rule(
    rule: Rule,
    device_type: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function by a rule; nothing inside of it is cast again."""
    lower = torch.get_autocast_dtype(device_type)
    args, options = tuple(args), dict(kwargs)
    if rule == Rule.REFUSED:
        raise RefusedOp(function.__name__)
    if rule == Rule.FLOAT32_RESULT:
        options = _with_float32_result(args, options, device_type)
    elif rule != Rule.AS_GIVEN:
        dtype = _dtype_for(rule, device_type, lower, (args, options))
        args = tuple(_cast(a, device_type, dtype) for a in args)
        options = {name: _cast(a, device_type, dtype) for name, a in options.items()}
    with torch.autocast(device_type, lower, False):
        return function(*args, **options)


def _dtype_for(rule: Rule, device_type: str, lower: torch.dtype, tree: Any) -> torch.dtype:
    if rule == Rule.LOWER:
        return lower
    if rule == Rule.FLOAT32 or _has_float32(tree, device_type):
        return torch.float32
    return lower


def is_eligible(value: Any, device_type: str) -> bool:
    """Whether autocast may cast this argument. Doubles are the user's own choice."""
    return (
        isinstance(value, Tensor)
        and value.device.type == device_type
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)([_cast(item, device_type, dtype) for item in value])
    return value.to(dtype) if is_eligible(value, device_type) else value


def _has_float32(tree: Any, device_type: str) -> bool:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return any(_has_float32(item, device_type) for item in tree)
    return is_eligible(tree, device_type) and bool(tree.dtype == torch.float32)


def _with_float32_result(
    args: tuple[Any, ...], options: dict[str, Any], device_type: str
) -> dict[str, Any]:
    is_given = options.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in args)
    if is_given or not args or not is_eligible(args[0], device_type):
        return options
    return {**options, "dtype": torch.float32}
