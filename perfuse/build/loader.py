"""Loading built libraries, with the one OpenMP runtime that torch has brought along.

Kernels are linked without an OpenMP runtime: two of them in one process would each start a team of
threads on the same cores. Their GOMP_* symbols are found in torch's, made visible here.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from functools import cache
from pathlib import Path

import torch

from perfuse.errors import PerfuseError

MAPS = Path("/proc/self/maps")
NOLOAD = getattr(os, "RTLD_NOLOAD", 0)


def mapped_openmp_runtimes(maps: str) -> tuple[str, ...]:
    """The OpenMP runtimes in the text of /proc/self/maps, torch's own and GNU's first."""
    paths = {words[5] for line in maps.splitlines() if len(words := line.split(None, 5)) == 6}
    runtimes = [path for path in paths if _is_runtime(os.path.basename(path))]
    home = str(Path(torch.__file__).parent)
    return tuple(
        sorted(runtimes, key=lambda path: (not path.startswith(home), "gomp" not in path, path))
    )


def _is_runtime(name: str) -> bool:
    return name.startswith(("libgomp", "libiomp", "libomp")) and ".so" in name


@cache
def _share_openmp_runtime() -> tuple[ctypes.CDLL, ...]:
    """Make the loaded OpenMP runtime visible to libraries loaded later; once is enough."""
    for path in mapped_openmp_runtimes(MAPS.read_text() if MAPS.exists() else ""):
        try:
            return (ctypes.CDLL(path, mode=os.RTLD_GLOBAL | NOLOAD),)
        except OSError:
            continue  # mapped, but not by the loader
    name = ctypes.util.find_library("gomp") or "libgomp.so.1"
    try:
        return (ctypes.CDLL(name, mode=os.RTLD_GLOBAL),)
    except OSError:
        return ()  # a library without parallel regions loads all the same


def load_library(path: Path) -> ctypes.CDLL:
    """Load a built library."""
    _share_openmp_runtime()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise PerfuseError(f"cannot load built code: {error}", at=str(path)) from error
