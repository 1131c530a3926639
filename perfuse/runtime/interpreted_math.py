"""`NumpyLibdevice`: the device library's functions for Triton's interpreter, which has none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

# Functions that have another name in NumPy, or do not exist there.
_NAMES = {
    "nearbyint": "rint", "acos": "arccos", "asin": "arcsin", "atan": "arctan",
    "acosh": "arccosh", "asinh": "arcsinh", "atanh": "arctanh", "atan2": "arctan2",
    "pow": "power",
}  # fmt: skip
_SPECIAL = {"erf": "erf", "erfc": "erfc", "erfinv": "erfinv", "lgamma": "gammaln"}


def _function(name: str) -> Callable[..., Any]:
    if name == "rsqrt":
        return lambda x: 1 / np.sqrt(x)
    if name in _SPECIAL:
        special: Any = importlib.import_module("scipy.special")
        return getattr(special, _SPECIAL[name])  # type: ignore[no-any-return]
    return getattr(np, _NAMES.get(name, name))  # type: ignore[no-any-return]


class NumpyLibdevice:
    """Stands where generated modules have `libdevice`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(_applied, _function(name))


def _applied(function: Callable[..., Any], *args: Any) -> Any:
    language = importlib.import_module("triton.language")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    first = next(a for a in args if isinstance(a, language.tensor))
    raw = [
        a.handle.data if isinstance(a, language.tensor) else np.asarray(a, first.handle.data.dtype)
        for a in args
    ]
    with np.errstate(all="ignore"):
        made = np.asarray(function(*raw))
    # A predicate is an int32 in the device library.
    kind = language.int32 if made.dtype == np.bool_ else first.dtype
    made = made.astype(np.int32 if made.dtype == np.bool_ else first.handle.data.dtype)
    is_block = any(a.type.is_block() for a in args if isinstance(a, language.tensor))
    whole = language.block_type(kind, list(made.shape)) if is_block else kind
    return language.tensor(interpreter.TensorHandle(made, kind), whole)
