"""Who wants to see what is compiled: each gets every `Compiled` of the compiles begun in its block.

Looking on changes one thing only: the graph cache is passed over, since an entry of it holds the
result without the artefacts that led to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from perfuse.pipeline import Compiled

Observer = Callable[[Compiled], None]

_observers: ContextVar[tuple[Observer, ...]] = ContextVar("perfuse_observers", default=())


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call `observer` with what is compiled in this block, in this thread or task."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def observers() -> tuple[Observer, ...]:
    """Those who look on here and now."""
    return _observers.get()
