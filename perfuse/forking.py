"""Forked processes: only the forking thread continues, with the locks of all others."""

from __future__ import annotations

import os
from threading import RLock
from weakref import WeakSet


class ForkLock:
    """A reentrant lock that is free in a forked process, even if it was held in the parent."""

    def __init__(self) -> None:
        self.renew()
        _LOCKS.add(self)

    def renew(self) -> None:
        self._inner = RLock()

    def __enter__(self) -> None:
        self._inner.acquire()

    def __exit__(self, *raised: object) -> None:
        self._inner.release()


_LOCKS: WeakSet[ForkLock] = WeakSet()
_GENERATION = [0]


def is_forked() -> bool:
    """Whether this process was forked from one in which Perfuse was imported."""
    return _GENERATION[0] > 0


def _after_fork() -> None:
    _GENERATION[0] += 1
    for lock in list(_LOCKS):
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)
