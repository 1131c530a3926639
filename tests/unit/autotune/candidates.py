"""Requests for tests of the worker pool: some give a time, the others do harm."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Honest:
    """Answers with a value, after some time."""

    value: Any = 1.5
    seconds: float = 0.0

    def answer(self) -> Any:
        time.sleep(self.seconds)
        return self.value


class Segfaults:
    """Reads address zero."""

    def answer(self) -> Any:
        return ctypes.string_at(0)


class Aborts:
    """Ends as a failed C assertion does."""

    def answer(self) -> Any:
        print("assertion `x > 0' failed", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGABRT)


class Exits:
    """Ends the worker with a status."""

    def answer(self) -> Any:
        os._exit(7)


class Hangs:
    """Never answers, and holds the interpreter."""

    def answer(self) -> Any:
        while True:
            pass


@dataclass(frozen=True)
class ForksAndHangs:
    """Leaves a child behind, whose number it writes to a file, and never answers."""

    path: str

    def answer(self) -> Any:
        child = os.fork()
        if child:
            with open(self.path, "w") as file:
                file.write(str(child))
        time.sleep(1000)


class AllocatesWithoutEnd:
    """Takes memory until there is none."""

    def answer(self) -> Any:
        held = []
        while True:
            held.append(bytearray(64 << 20))


class Raises:
    """Raises an exception of Python."""

    def answer(self) -> Any:
        raise RuntimeError("too many registers")


class WritesToEveryPipe:
    """Writes bytes that are not a reply to every descriptor it has."""

    def answer(self) -> Any:
        for fd in (int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2):
            try:
                os.write(fd, b"\x00" * 7 + b"\x04" + b"nope")
            except OSError:
                continue
        return 1.0


@dataclass(frozen=True)
class Environment:
    """Answers with a variable of the worker's environment."""

    name: str

    def answer(self) -> Any:
        return os.environ.get(self.name)


class SlowEnvironment(Environment):
    """Takes long enough that no worker serves all."""

    def answer(self) -> Any:
        time.sleep(0.3)
        return super().answer()


class Pid:
    """Answers with the number of the worker."""

    def answer(self) -> int:
        return os.getpid()
