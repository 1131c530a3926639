"""Functions and example arguments as the command line names them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console

console = Console()

FUNCTION = typer.Argument(help="module:function, or path/to/file.py:function")
ARGUMENTS = typer.Option("--args", help="A function there that returns example arguments.")


def example_args(module: Any, function: str, arguments: str) -> tuple[Any, ...]:
    made = getattr(module, arguments, None)
    if not callable(made):
        fail(f"{function.rpartition(':')[0]} has no function {arguments!r} to make arguments")
    return _called(made)


def _called(make: Callable[[], Any]) -> tuple[Any, ...]:
    made = make()
    return made if isinstance(made, tuple) else (made,)


def found_function(function: str) -> tuple[Any, str]:
    """The module, and the name in it, behind `module:function` or `file.py:function`."""
    place, _, name = function.rpartition(":")
    if not place:
        fail(f"{function!r}: say module:function or file.py:function")
    module = _loaded(place) if place.endswith(".py") else _imported(place)
    if not callable(getattr(module, name, None)):
        fail(f"{place} has no function {name!r}")
    return module, name


def _imported(place: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # one that the module itself asks for
        fail(f"there is no module {place!r}")


def _loaded(place: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None or not Path(place).exists():
        fail(f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def fail(message: str) -> NoReturn:
    console.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)
