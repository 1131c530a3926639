"""A worker process: one program of `tests.gpu.programs` a task."""

from __future__ import annotations

import traceback

import torch

from tests.gpu.programs import LARGE, SMALL
from tests.harness.devices import is_healthy, keep_all_bits
from tests.harness.pool import RETIRE, Result, Task, serve

PROGRAMS = {program.name: program for program in (*SMALL, *LARGE)}
NUM_FRAMES = 3


def handle(task: Task) -> Result:
    device = task["device"]
    result = {"status": "pass", "message": ""}
    try:
        PROGRAMS[task["program"]].check(device, task["backend"])
    except AssertionError as error:
        result = {"status": "wrong", "message": str(error)[:600]}
    except Exception as error:
        result = {"status": "error", "message": short_traceback(error)}
    if not is_healthy(device):
        result |= {"status": "crash", RETIRE: True}
    return result


def short_traceback(error: Exception) -> str:
    """The message, then the innermost lines: enough to know where, short enough for a table."""
    frames = traceback.extract_tb(error.__traceback__)[-NUM_FRAMES:]
    places = " < ".join(
        f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in frames[::-1]
    )
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]} at {places}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_all_bits()
    serve(handle)
