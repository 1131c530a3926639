"""Observers of compiles: each gets every `Compiled` of the compiles started in its block.

Observing changes one thing: the graph cache is bypassed, since an entry of it holds the
result without the artefacts that led to it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from perfuse.context import Context
from perfuse.graph.partition import Cut
from perfuse.pipeline import Compiled

Observer = Callable[[Compiled], None]
CutObserver = Callable[[Cut, Context], None]

_observers: ContextVar[tuple[Observer, ...]] = ContextVar("perfuse_observers", default=())
_cut_observers: ContextVar[tuple[CutObserver, ...]] = ContextVar("perfuse_cuts", default=())


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call `observer` with what is compiled in this block, in this thread or task."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def observers() -> tuple[Observer, ...]:
    """Observers of compiles active in this context."""
    return _observers.get()


@contextmanager
def observing_cuts(observer: CutObserver) -> Iterator[None]:
    """Call `observer` with every joint graph that is cut in this block, in this thread or task."""
    token = _cut_observers.set((*_cut_observers.get(), observer))
    try:
        yield
    finally:
        _cut_observers.reset(token)


def cut_observers() -> tuple[CutObserver, ...]:
    """Observers of cuts active in this context."""
    return _cut_observers.get()
