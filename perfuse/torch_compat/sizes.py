"""Symbolic sizes: expressions, ranges, hints."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import (
    free_symbols,
    guard_or_false,
    statically_known_true,
)
from torch.utils._sympy.symbol import SymT, symbol_is_type


def sym_expression(value: Any) -> Any:
    """The expression behind a SymInt, SymFloat or SymBool, to compare without adding a guard."""
    return value.node.expr


def free_symbols_of(value: Any) -> set[Any]:
    """The size symbols in a fake tensor's shape and strides, or in a SymInt."""
    return set(free_symbols(value))


def is_from_data(symbol: Any) -> bool:
    """Whether it is a symbol that stands for a data-dependent number: a size, or a float."""
    return symbol.is_Symbol and symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


def has_hint(size: Any) -> bool:
    """Whether the size is known in the call that is traced."""
    return isinstance(size, int) or bool(size.node.has_hint())


def size_hint(size: Any) -> int:
    """A likely value of a size, without adding a guard: the one seen while tracing."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return 4096 if hint is None else int(hint)


UNKNOWN_LEAST = -(2**62)


def symbol_facts(values: Iterable[Any]) -> list[str]:
    """The range and the first size of each size symbol in these values."""
    found: dict[str, str] = {}
    for value in sym_leaves(values):
        env = value.node.shape_env
        for symbol in value.node.expr.free_symbols:
            hint = env.backed_var_to_val.get(symbol, "?")
            found[str(symbol)] = f"{symbol} in {env.var_to_range.get(symbol)} seen {hint}"
    return [found[name] for name in sorted(found)]


def least_values(value: torch.SymInt) -> dict[str, int]:
    """The least that each symbol of a number can be; far below zero where nothing is known."""
    ranges = value.node.shape_env.var_to_range
    found = {}
    for symbol in value.node.expr.free_symbols:
        known = ranges.get(symbol)
        is_known = known is not None and known.lower.is_Integer
        found[str(symbol)] = int(known.lower) if is_known else UNKNOWN_LEAST
    return found


def is_known_empty(x: torch.Tensor) -> bool:
    """Whether it is known to be empty while tracing; data-dependent sizes count as not empty."""
    return bool(guard_or_false(x.numel() == 0))


def is_known_negative(number: Any) -> bool:
    """Whether a number, or one behind a symbol, is known to be less than zero while tracing."""
    return bool(statically_known_true(number < 0))


def is_negative_now(number: Any) -> bool:
    """Whether a number is less than zero in the call that is traced; data-dependent ones are not.

    Guards keep the answer.
    """
    return bool(guard_or_false(number < 0))


def is_known_place(index: Any, size: Any) -> bool:
    """Whether it is known while tracing that there is such a place, counted from either end.

    PyTorch 2.13 guards on that when it traces a selection, 2.11 does not.
    """
    return bool(statically_known_true(index < size) and statically_known_true(index >= -size))


def sym_leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Every symbolic number in these values: sizes and strides of tensors, and numbers."""
    for value in values:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            yield value
        elif isinstance(value, tuple | list):
            yield from sym_leaves(value)
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            yield from sym_leaves((*value.shape, *value.stride(), value.storage_offset()))


def symbol_hints(values: Iterable[Any]) -> dict[str, int]:
    """The size first seen for each size symbol in these values, where it is known."""
    found: dict[str, int] = {}
    for value in sym_leaves(values):
        known = value.node.shape_env.backed_var_to_val
        for symbol in value.node.expr.free_symbols:
            # The length of a nested tensor is a symbol for itself: it has no number.
            if symbol in known and known[symbol].is_Integer:
                found[str(symbol)] = int(known[symbol])
    return found
