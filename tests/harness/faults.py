"""A double of the system in which one operation goes wrong, and all that can go wrong with it."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from _ctypes import dlclose
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfuse.system import Exited, System

OPERATIONS = tuple(name for name in vars(System) if not name.startswith("_"))


class Killed(BaseException):
    """The process has ended here: no clean-up of its own reaches the disk."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that can go wrong with some operations."""

    name: str
    happens: Callable[[Double, Callable[..., Any], tuple[Any, ...]], Any]
    only: tuple[str, ...] = OPERATIONS


class Double(System):
    """The real system, except for a compiler that answers at once and the operation `at`."""

    def __init__(self, fault: Fault | None = None, at: int = -1) -> None:
        self.fault = fault
        self.at = at
        self.calls: list[str] = []
        self.is_dead = False
        self.meanwhile: Callable[[], object] = lambda: None  # what another process does
        self.held_back: dict[int, list[bytes]] = {}  # by descriptor: written, not yet on the disk
        self.handles: list[ctypes.CDLL] = []

    def close_libraries(self) -> None:
        """Unload what was loaded: thousands of points load thousands of libraries."""
        for library in self.handles:
            dlclose(library._handle)


LIBRARIES: dict[str, bytes] = {}


def _spawn(
    self: Double, command: Sequence[str], folder: Path, environment: Mapping[str, str], _: Any
) -> Exited:
    """The compiler, run once for each command and source; then its result is known."""
    sources = [(folder / word).read_bytes() for word in command if word.endswith(".cpp")]
    key = hashlib.sha256(repr((command, sources)).encode()).hexdigest()
    if key not in LIBRARIES:
        done = System.spawn(self, command, folder, environment, None)
        if done.code != 0:
            return done
        LIBRARIES[key] = (folder / command[-1]).read_bytes()
    else:
        (folder / command[-1]).write_bytes(LIBRARIES[key])
    return Exited(0, "")


def _dlopen(self: Double, path: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    library = System.dlopen(self, path, mode)
    if path.startswith("/proc/self/fd") or "perfuse-" in path:
        self.handles.append(library)
    return library


REAL: dict[str, Any] = {name: getattr(System, name) for name in OPERATIONS}
REAL |= {"spawn": _spawn, "dlopen": _dlopen}


def _operation(name: str) -> Callable[..., Any]:
    def run(self: Double, *args: Any, **kwargs: Any) -> Any:
        if self.is_dead:
            raise Killed
        number = len(self.calls)
        self.calls.append(name)

        def real(*changed: Any) -> Any:
            return REAL[name](self, *(changed or args), **({} if changed else kwargs))

        if number == self.at and self.fault is not None:
            return self.fault.happens(self, real, args)
        if name in ("fsync", "close") and args[0] in self.held_back:
            data = self.held_back.pop(args[0])
            for chunk in data if name == "fsync" else ():
                os.write(args[0], chunk)
        return real()

    return run


for _name in OPERATIONS:
    setattr(Double, _name, _operation(_name))


def _failing(number: int) -> Fault:
    def happens(double: Double, real: Any, args: tuple[Any, ...]) -> Any:
        if double.calls[-1] == "close":
            real()  # Linux gives the descriptor back, whatever it reports
        raise OSError(number, os.strerror(number))

    return Fault(errno.errorcode[number], happens)


def _done_but_failing(double: Double, real: Any, args: tuple[Any, ...]) -> Any:
    made = real()
    if double.calls[-1] in ("open", "memfd"):
        os.close(made)
    raise OSError(errno.EIO, "done, and reported to have failed")


def _short(double: Double, real: Any, args: tuple[Any, ...]) -> Any:
    """Half of it, which is allowed: the caller has to ask again."""
    fd, what = args
    if isinstance(what, int):
        return real(fd, max(1, min(what, 64)))
    return real(fd, what[: max(1, len(what) // 2)])


def _torn(double: Double, real: Any, args: tuple[Any, ...]) -> Any:
    """A disk that loses the second half and reports success."""
    fd, what = args
    if isinstance(what, int):
        data: bytes = real(fd, what)
        return data[: len(data) // 2]
    real(fd, what[: len(what) // 2])
    return len(what)


def _reordered(double: Double, real: Any, args: tuple[Any, ...]) -> Any:
    """Written after all that follows, a rename included, unless there is an fsync in between."""
    fd, data = args
    double.held_back.setdefault(fd, []).append(bytes(data))
    return len(data)


def _delayed(double: Double, real: Any, args: tuple[Any, ...]) -> Any:
    """So late that another process has done all the same work in the meantime."""
    double.meanwhile()
    return real()


def _killed(double: Double, real: Any, args: tuple[Any, ...]) -> Any:
    double.is_dead = True
    raise Killed


ERRORS = (errno.ENOSPC, errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOENT, errno.EROFS)
SHARED = ("open", "lstat", "listdir", "mkdir", "rename", "unlink", "rmdir", "utime", "spawn")
FAILING = tuple(map(_failing, ERRORS))
FAULTS = (
    Fault("done, reported as failed", _done_but_failing),
    Fault("short", _short, ("read", "write")),
    Fault("torn", _torn, ("read", "write")),
    Fault("reordered", _reordered, ("write",)),
    Fault("delayed", _delayed, SHARED),  # operations on what other processes see
    Fault("killed", _killed),
)
