"""The versions of PyTorch that Perfuse is tested with, and the warning about others."""

from __future__ import annotations

import re
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

from perfuse.errors import VersionWarning
from perfuse.version import VERSION

OLDEST, NEWEST = (2, 11), (2, 15)


def torch_version() -> str:
    """The installed version of PyTorch, without importing it; "" if there is none."""
    loaded = sys.modules.get("torch")
    if loaded is not None:
        return str(getattr(loaded, "__version__", ""))
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def is_supported(torch_version: str) -> bool:
    """Whether this version, a release or a build on the way to one, is in the tested range."""
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST


def warn_unsupported_torch() -> None:
    """Warn once, when Perfuse is imported, about an untested version of PyTorch."""
    found = torch_version()
    if found and not is_supported(found):
        oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
        warnings.warn(
            f"Perfuse {VERSION} supports PyTorch {oldest} to {newest}, but this is {found}: "
            "compiling may fail or give wrong results",
            VersionWarning,
            stacklevel=3,
        )
