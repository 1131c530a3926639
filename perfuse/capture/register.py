"""`register`: make `backend="perfuse"` known to PyTorch, without loading its compiler front end.

An installed Perfuse is found by its entry point. One that is only importable (a checkout on
`PYTHONPATH`) provides the same entry point through its own finder; if Dynamo, which looks for entry
points only once, is already loaded, the entry point is added to its table. Either way the backend
itself is imported when it is first used.
"""

import importlib
import sys
from collections.abc import Iterable
from importlib.metadata import (
    Distribution,
    DistributionFinder,
    EntryPoint,
    PackageNotFoundError,
    distribution,
)
from os import PathLike
from typing import Any

from perfuse.version import VERSION

NAME = "perfuse"
ENTRY_POINT = EntryPoint(NAME, "perfuse.capture.backend:perfuse_backend", "torch_dynamo_backends")
DYNAMO = "torch._dynamo"


class Uninstalled(Distribution):
    """The backend entry point that an installed Perfuse has in its metadata."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n",
            "entry_points.txt": f"[{ENTRY_POINT.group}]\n{NAME} = {ENTRY_POINT.value}\n",
        }.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Any:
        raise FileNotFoundError(path)


class Finder(DistributionFinder):
    """Adds `Uninstalled` to the distributions, and finds no modules."""

    def find_spec(self, *_: object, **__: object) -> None:
        return None

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        is_asked = context is None or context.name in (None, NAME)
        return [Uninstalled()] if is_asked else []


def register() -> None:
    """Register the backend, installed or not; idempotent."""
    if not _is_installed():
        sys.meta_path.append(Finder())
    if DYNAMO in sys.modules:
        compat = importlib.import_module("perfuse.torch_compat.registration")
        compat.add_dynamo_backend(ENTRY_POINT)


def _is_installed() -> bool:
    try:
        distribution(NAME)
    except PackageNotFoundError:
        return False
    return True
