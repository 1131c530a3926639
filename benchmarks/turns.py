"""Turns on one machine: processes that compile side by side, and measure alone.

A file named in the environment is locked: shared by whoever works, exclusively by whoever measures.
Without it nobody else is there, and nobody waits. Where many share the file, it is seldom free for
one alone, so those that wait for it measure one after the other once one of them has it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TURN = "BENCHMARK_TURN"  # in the environment: the file
POLL_S = 0.05
MAX_ALONE_S = 90.0  # that the others are kept waiting


@contextmanager
def my_turn() -> Iterator[None]:
    """Nobody else is measuring; at once, where nobody else could be."""
    with _locked(fcntl.LOCK_EX):
        yield


@contextmanager
def working() -> Iterator[Turn]:
    """Nobody is measuring; others may be working."""
    with _locked(fcntl.LOCK_SH) as turn:
        yield turn


class Turn:
    """A held lock, or none."""

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else works or measures. The shared lock is given back for it, and not taken
        again: measuring is the last thing that a process does."""
        if self.descriptor is None:
            yield
            return
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        queue = _Queue(Path(f"{os.environ[TURN]}.queue"))
        try:
            with queue.turn(self.descriptor):
                yield
        finally:
            queue.mark.unlink(missing_ok=True)


class _Queue:
    """Processes that wait to be alone. One of them takes the lock for all, and gives it back when
    nobody waits any more or it had it for long enough."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.leader = folder / "leader"  # a link to the process that has the lock
        self.mark = folder / f"{os.getpid()}.waiting"

    @contextmanager
    def turn(self, descriptor: int) -> Iterator[None]:
        self.mark.touch()
        with (
            (self.folder / "leading").open("a") as leading,
            (self.folder / "measuring").open("a") as measuring,
        ):
            while True:
                if _is_taken(leading.fileno()):
                    with self.led(descriptor), self.measured(measuring.fileno()):
                        yield
                    return
                if self.is_led():
                    with self.measured(measuring.fileno()):
                        if self.is_led():  # still, after waiting for another to measure
                            yield
                            return
                time.sleep(POLL_S)

    @contextmanager
    def measured(self, descriptor: int) -> Iterator[None]:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    @contextmanager
    def led(self, descriptor: int) -> Iterator[None]:
        self.leader.unlink(missing_ok=True)  # of one that was killed
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        deadline = time.monotonic() + MAX_ALONE_S
        self.leader.symlink_to(str(os.getpid()))
        try:
            yield
            self.mark.unlink()
            while self.is_awaited() and time.monotonic() < deadline:
                time.sleep(POLL_S)
        finally:
            self.mark.unlink(missing_ok=True)
            self.leader.unlink(missing_ok=True)
            with (self.folder / "measuring").open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # whoever measures has ended then
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def is_led(self) -> bool:
        try:
            return _is_alive(os.readlink(self.leader))
        except FileNotFoundError:
            return False

    def is_awaited(self) -> bool:
        return any(_is_alive(mark.stem) for mark in self.folder.glob("*.waiting"))


def _is_alive(process: str) -> bool:
    return Path(f"/proc/{process}").exists()


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _locked(kind: int) -> Iterator[Turn]:
    if TURN not in os.environ:
        yield Turn(None)
        return
    with open(os.environ[TURN], "a") as file:
        fcntl.flock(file, kind)
        try:
            yield Turn(file.fileno())
        finally:
            # Said, not left to closing the file: a process forked meanwhile has it open too.
            fcntl.flock(file, fcntl.LOCK_UN)
