"""Perfuse in Dynamo: its backend, its package, its callbacks."""

import importlib
import pkgutil
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any


def add_dynamo_backend(entry_point: EntryPoint) -> None:
    """Put a backend into Dynamo's table of those that are imported on first use."""
    from torch._dynamo.backends import registry

    registry._BACKENDS.setdefault(entry_point.name, entry_point)


def reset_dynamo() -> None:
    """Forget every compiled function, so that the next call compiles again."""
    import torch._dynamo

    torch._dynamo.reset()


def never_trace(package: str, but: str) -> None:
    """Dynamo is not to look into the functions of a package: they run the graphs it made.

    Those of its room `but` are traced where a traced function calls them, and only there: by
    themselves they handle calls of functions that Dynamo left to PyTorch.
    """
    import torch._dynamo.trace_rules as rules

    inlined: Any = getattr(rules, "BUILTIN_INLINE_WHEN_CALLED", None)
    folders = importlib.import_module(package).__path__
    if isinstance(inlined, set):
        inlined.update(f"{folder}/{but}/" for folder in folders)
        rules.add(package)
        return
    for module in pkgutil.iter_modules(folders):
        if module.name != but:
            rules.add(f"{package}.{module.name}")


def on_compile(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Call `start` before and `end` after Dynamo captures and compiles something."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
