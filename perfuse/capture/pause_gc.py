"""No garbage collection while Dynamo captures, or while a backward is compiled later.

Both make many objects and little garbage: on the warm start of a 12-layer model, collecting took a
seventh of the whole first call. Objects created meanwhile are then moved to the oldest generation,
unvisited: that is where collections would have left them, and the first one afterwards need not
visit them all.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from perfuse import config
from perfuse.torch_compat.dynamo import is_compiling_here
from perfuse.torch_compat.registration import on_compile

# Python 3.12 starts with a few hundred frozen objects of its own; a program freezes, if at all, the
# many thousands that its imports made.
_FROZEN_AT_START = 1000

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


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause while compiling; inside a capture, which ends the pause itself, do nothing."""
    # Never pause for another to resume: a capture in another thread may be over by then.
    is_outermost = not _paused
    if is_outermost:
        _pause(None)
    try:
        yield
    finally:
        if is_outermost:
            _resume(None)


def _promote() -> None:
    """Move all young objects to the oldest generation."""
    # Objects that the program has frozen must stay so, and `unfreeze` unfreezes all.
    if gc.get_freeze_count() <= _FROZEN_AT_START:
        gc.freeze()
        gc.unfreeze()


@cache
def pause_garbage_collection() -> None:
    """Install the pause around captures; calling it again does nothing."""
    on_compile(_pause, _resume)
    os.register_at_fork(after_in_child=_resume_in_child)


def _resume_in_child() -> None:
    """Resume in a forked child: the thread that paused may not exist there."""
    if not is_compiling_here():
        _resume(None)
