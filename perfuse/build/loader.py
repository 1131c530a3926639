"""Loading built libraries, with the one OpenMP runtime that torch has loaded.

Kernels are linked without an OpenMP runtime: two of them in one process would each start a team of
threads on the same cores. Their GOMP_* symbols are found in torch's, made visible here.

A library is loaded from bytes that were checked, through sealed memory: no file that could be
replaced in between, no path under which the loader remembers an older library.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import hashlib
import itertools
import os
from functools import cache
from pathlib import Path

import torch

from perfuse.build.elf import check_library
from perfuse.cache.folders import new_name, private_folders
from perfuse.errors import LibraryDamaged
from perfuse.system import remove_tree, system, write_all, write_file

MAPS = Path("/proc/self/maps")
NOLOAD = getattr(os, "RTLD_NOLOAD", 0)


def mapped_openmp_runtimes(maps: str) -> tuple[str, ...]:
    """The OpenMP runtimes in the text of /proc/self/maps, torch's own and GNU's first."""
    paths = {words[5] for line in maps.splitlines() if len(words := line.split(None, 5)) == 6}
    runtimes = [path for path in paths if _is_runtime(os.path.basename(path))]
    home = str(Path(torch.__file__).parent)
    runtimes.sort(key=lambda path: (not path.startswith(home), "gomp" not in path, path))
    return tuple(runtimes)


def _is_runtime(name: str) -> bool:
    return name.startswith(("libgomp", "libiomp", "libomp")) and ".so" in name


@cache
def _share_openmp_runtime() -> tuple[ctypes.CDLL, ...]:
    """Make the loaded OpenMP runtime visible to libraries loaded later; once is enough."""
    for path in mapped_openmp_runtimes(MAPS.read_text() if MAPS.exists() else ""):
        try:
            return (system().dlopen(path, os.RTLD_GLOBAL | NOLOAD),)
        except OSError:
            continue  # mapped, but not by the loader
    name = ctypes.util.find_library("gomp") or "libgomp.so.1"
    try:
        return (system().dlopen(name, os.RTLD_GLOBAL),)
    except OSError:
        return ()  # a library without parallel regions loads all the same


# By content: the same library is mapped once, and a changed one is never taken for the old.
# No lock: two threads may both load it and one is kept, and a fork leaves nothing locked.
_loaded: dict[str, ctypes.CDLL] = {}
_serials = itertools.count(1)


def load_library(data: bytes) -> ctypes.CDLL:
    """Load a shared library from its bytes; raises LibraryDamaged if they are not one."""
    digest = hashlib.sha256(data).hexdigest()
    found = _loaded.get(digest)
    if found is None:
        check_library(data)
        _share_openmp_runtime()
        found = _loaded.setdefault(digest, _load(data, digest))
    return found


def _load(data: bytes, digest: str) -> ctypes.CDLL:
    """From memory; from a private file where memory cannot hold code (SELinux, no /proc)."""
    reasons: list[OSError] = []
    try:
        return _from_memory(data, digest)
    except OSError as error:
        reasons.append(error)
    for folder in private_folders():
        try:
            return _from_file(data, folder / f"{new_name()}.so")
        except OSError as error:
            reasons.append(error)
    message = "; ".join(dict.fromkeys(map(str, reasons)))
    raise LibraryDamaged(f"cannot load built code: {message}") from reasons[0]


def _from_memory(data: bytes, digest: str) -> ctypes.CDLL:
    fd = system().memfd(f"perfuse-{digest[:16]}")
    try:
        write_all(fd, data)
        system().seal(fd)
        _check_size(system().fstat(fd), data)
        return system().dlopen(f"/proc/self/fd/{_spelled(next(_serials))}{fd}")
    finally:
        with contextlib.suppress(OSError):
            system().close(fd)


def _check_size(status: os.stat_result, data: bytes) -> None:
    """Raise on a truncated library: loading one does not fail, it kills the process."""
    if status.st_size != len(data):
        raise OSError(errno.EIO, f"truncated: {status.st_size} of {len(data)} bytes")


def _spelled(serial: int) -> str:
    """A number in parts of a path that lead nowhere.

    The loader takes a path that it has seen for the library it has seen there, and descriptors
    are reused: each library has to have a path of its own.
    """
    return "".join("./" if bit == "1" else "/" for bit in f"{serial:b}")


def _from_file(data: bytes, path: Path) -> ctypes.CDLL:
    try:
        write_file(path, data)
        _check_size(system().lstat(path), data)
        return system().dlopen(str(path))
    finally:
        remove_tree(path)  # what is mapped stays
