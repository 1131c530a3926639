"""`Context`: the one value a stage needs besides its artefact."""

from __future__ import annotations

from dataclasses import dataclass

from perfuse import config
from perfuse.config import Settings
from perfuse.counters import Counters, counters
from perfuse.target import Target, host_target


@dataclass(frozen=True, slots=True)
class Context:
    """What is compiled for, under which settings, and where what happens is counted."""

    target: Target
    settings: Settings
    counters: Counters

    @staticmethod
    def default(settings: Settings | None = None) -> Context:
        """This machine, the settings as they are now, and the process's counters."""
        chosen = config.snapshot() if settings is None else settings
        return Context(host_target(chosen), chosen, counters)
