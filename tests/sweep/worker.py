"""A worker process of `tests.sweep.run`: one row a task."""

from __future__ import annotations

import itertools
import os
import warnings

import torch

from tests.harness.devices import keep_all_bits
from tests.harness.pool import RETIRE, Result, Task, serve
from tests.sweep.families import FAMILIES
from tests.sweep.judge import judged
from tests.sweep.packages import use_packages
from tests.sweep.subject import NotMade

MAX_ROWS = 32  # compiled code and modules grow: a process is for a few
num_done = itertools.count(1)


def handle(task: Task) -> Result:
    before = cpu_seconds()
    result = swept(task["row"], task["backend"])
    result["cpu_seconds"] = round(cpu_seconds() - before, 2)  # on a busy machine the honest time
    return result | {RETIRE: next(num_done) >= MAX_ROWS}


def cpu_seconds() -> float:
    """Processor time of this process and the compilers it started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def swept(row: str, backend: str) -> Result:
    """One row: "timm/resnet18/train"."""
    family, name, variant = row.split("/")
    try:
        subject = FAMILIES[family].make(name, variant)
    except NotMade as error:
        return {"status": "skip", "message": str(error)}
    return judged(subject, backend)


if __name__ == "__main__":
    use_packages()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_all_bits()
    serve(handle)
