"""`Backend`: the functions that one kind of device adds to the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from perfuse.cache.manifest import Entry
from perfuse.codegen.host.source import HostSource
from perfuse.context import Context
from perfuse.errors import KernelTooLarge
from perfuse.runtime.host_names import Call
from perfuse.target import Target

if TYPE_CHECKING:
    from perfuse.schedule.plan import Plan


class Sources(Protocol):
    """The result of `generate`; only the backend's own functions know more about it."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The generated kernels, a text for each unit."""


@dataclass(frozen=True, slots=True)
class Backend:
    """Four functions, called in this order. `load` runs no compiler and needs no plan.

    If `build` raises KernelTooLarge, `retile` gives the plan that is generated next.
    """

    name: str
    serves: Callable[[Target], bool]
    generate: Callable[[Plan, Context], Any]  # Sources of its own kind
    build: Callable[[Any, Context], tuple[Entry, ...]]  # may raise KernelTooLarge
    host: Callable[[Plan, Any, Context], HostSource]
    load: Callable[[HostSource, Sequence[Entry], Mapping[str, Any], Context], Call]
    retile: Callable[[Plan, Any, KernelTooLarge, Context], Plan] | None = None
