"""Which function lowers which ATen op. Adding an op is one decorated function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

LoweringFn = Callable[..., Any]
F = TypeVar("F", bound=LoweringFn)
LOWERINGS: dict[Any, LoweringFn] = {}
HIGHER_ORDER = "higher_order"  # the namespace of ops that take functions: they have no overloads
# Ops that PyTorch only defines when a part of it is first imported, by name.
_LATE: dict[str, LoweringFn] = {}


def resolve(name: str) -> list[Any]:
    """Overloads for "aten.add.Tensor", or every overload for "aten.add"; [] if torch lacks it."""
    parts = name.split(".")
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
        if found is None:
            return []
    if len(parts) == 2 and parts[0] != HIGHER_ORDER:
        return [getattr(found, overload) for overload in found.overloads()]
    return [found]


def lowers(*names: str) -> Callable[[F], F]:
    """Register a lowering `fn(builder, *args, **kwargs)` for the named ops."""

    def register(fn: F) -> F:
        for name in names:
            for op in (found := resolve(name)):
                LOWERINGS[op] = fn
            if not found:
                _LATE[name.removeprefix(f"{HIGHER_ORDER}.")] = fn
        return fn

    return register


def lowering_of(op: Any) -> LoweringFn | None:
    """The lowering of an op; the op itself may have been defined later than the lowerings."""
    if op not in LOWERINGS and str(op) in _LATE:
        LOWERINGS[op] = _LATE[str(op)]
    return LOWERINGS.get(op)


class CannotLower(Exception):
    """Raised by a lowering that does not cover these arguments: the op runs as an ATen call."""
