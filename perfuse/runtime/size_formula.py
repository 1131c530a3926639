"""Formulas over the names of sizes, as `host_formula` writes them, compiled and evaluated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType
from typing import Any


def place_of(index: int, size: int) -> int:
    """The place that an index means, which counts from the end where it is negative."""
    if not -size <= index < size:
        raise IndexError(f"select(): index {index} out of range for a dimension of size {size}")
    return index + size if index < 0 else index


_BUILTINS = (max, min, abs, int, float, round)
FUNCTIONS: dict[str, Any] = {"__builtins__": {}, "math": math}
FUNCTIONS |= {function.__name__: function for function in (*_BUILTINS, place_of)}


def evaluate(formula: CodeType, sizes: Mapping[str, int]) -> Any:
    """The value, or the truth, of a compiled formula."""
    return eval(formula, FUNCTIONS, sizes)


def size_value(formula: str, sizes: Mapping[str, int]) -> int:
    """The size that a formula evaluates to."""
    known = sizes.get(formula)
    return known if known is not None else int(evaluate(compiled_formula(formula), sizes))


@lru_cache(maxsize=4096)
def compiled_formula(formula: str) -> CodeType:
    """Compile a formula for evaluation; SyntaxError if it is not one."""
    return compile(formula, "<size formula>", "eval")


def names_in(formula: str) -> set[str]:
    """The sizes that a formula depends on."""
    return set(compiled_formula(formula).co_names) - FUNCTIONS.keys()
