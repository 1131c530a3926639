"""No garbage collection while Dynamo captures: it makes many objects and little garbage.

On the warm start of a 12-layer model, collecting was a seventh of the whole first call. What was
made meanwhile is then moved to the oldest generation, unvisited: that is where collections during
the capture would have left it, and the first one afterwards need not walk through all of it.
"""

from __future__ import annotations

import gc
from functools import cache
from typing import Any

from perfuse import config
from perfuse.torch_compat import on_compile

_paused: list[bool] = []


def _pause(_: Any) -> None:
    if config.snapshot().pause_gc and gc.isenabled():
        gc.disable()
        _paused.append(True)


def _resume(_: Any) -> None:
    if _paused:
        _paused.clear()
        _promote()
        gc.enable()


def _promote() -> None:
    """All that is young becomes old."""
    # What somebody has frozen must stay so, and `unfreeze` knows no difference.
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()


@cache
def pause_garbage_collection() -> None:
    """From now on, pause while something is captured; asked for again, do nothing."""
    on_compile(_pause, _resume)
