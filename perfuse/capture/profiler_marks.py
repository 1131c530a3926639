"""A captured graph is called without marks for a profiler around what leads to it.

By default Dynamo has every call of a graph open and close a profiler's row ("Pregraph bytecode"),
whether or not a profiler is there: some microseconds, a tenth of a small graph's call. It asks for
its setting after the backend has returned, so the setting is put back when the capture ends.
"""

from __future__ import annotations

from typing import Any

from perfuse.torch_compat import after_compile, is_capturing, set_marks_runtime

_before: list[bool] = []  # of the capture under way


def leave_out_marks() -> None:
    """Until the capture that is under way ends, if there is one, Dynamo writes no marks."""
    if is_capturing() and not _before:
        after_compile(_put_back)
        _before.append(set_marks_runtime(False))


def _put_back(_: Any) -> None:
    if _before:
        set_marks_runtime(_before.pop())
