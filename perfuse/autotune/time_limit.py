"""The time limit for tuning: one for all questions of a graph, and a second in default mode."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from perfuse.context import Context
from perfuse.decision import OUT_OF_TIME
from perfuse.errors import PerfuseError
from perfuse.selection import is_selecting

DEFAULT_MODE_S = 1.0


class OutOfTime(PerfuseError):
    """A candidate that was not started before the time limit for tuning."""

    is_late = True

    def __init__(self) -> None:
        super().__init__(OUT_OF_TIME)


def limited(context: Context) -> Context:
    """The context of a graph whose tuning begins now."""
    settings = context.settings
    limit_s = float(settings.tune_seconds) or math.inf
    if not is_selecting(settings):
        limit_s = min(limit_s, DEFAULT_MODE_S)
    return replace(context, tune_until=time.perf_counter() + limit_s)


def seconds_left(context: Context) -> float:
    """The seconds until the time limit for tuning; 0 once it is reached."""
    return max(0.0, context.tune_until - time.perf_counter())
