"""Observers of compiles: each gets every `Compiled` of the compiles started in its block.

Observing changes one thing: the graph cache is bypassed, since an entry of it holds the
result without the artefacts that led to it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from perfuse.context import Context

if TYPE_CHECKING:
    from perfuse.graph.partition import Cut
    from perfuse.pipeline import Compiled

Observer = Callable[["Compiled"], None]
CutObserver = Callable[["Cut", Context], None]
Kind = TypeVar("Kind")

_observers: ContextVar[tuple[Observer, ...]] = ContextVar("perfuse_observers", default=())
_cut_observers: ContextVar[tuple[CutObserver, ...]] = ContextVar("perfuse_cuts", default=())


@contextmanager
def _added(active: ContextVar[tuple[Kind, ...]], observer: Kind) -> Iterator[None]:
    """A block, in this thread or task, in which one more observer is active."""
    token = active.set((*active.get(), observer))
    try:
        yield
    finally:
        active.reset(token)


observers, cut_observers = _observers.get, _cut_observers.get
observing = partial(_added, _observers)  # `observing(call)`: with what is compiled in the block
observing_cuts = partial(_added, _cut_observers)  # with every joint graph that is cut in it
