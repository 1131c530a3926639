"""A worker process: one architecture, forward or a training step, a task."""

from __future__ import annotations

import torch

from tests.harness.devices import is_healthy, keep_all_bits
from tests.harness.pool import RETIRE, Result, Task, serve
from tests.models.check import check_model
from tests.models.zoo import FURTHER, NAMED

ARCHITECTURES = {a.name: a for a in (*NAMED, *FURTHER)}


def handle(task: Task) -> Result:
    architecture, device = ARCHITECTURES[task["architecture"]], task["device"]
    result = {"status": "pass", "message": ""}
    try:
        report = check_model(
            architecture, train=task["train"], backend=task["backend"], device=device
        )
        if report.problems:
            result = {"status": "wrong", "message": "; ".join(report.problems[:3])[:600]}
        elif report.num_graphs > report.num_graphs_eager:
            result = {"status": "wrong", "message": "more graphs than Dynamo alone makes"}
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
        result = {"status": "error", "message": message}
    if not is_healthy(device):
        result |= {"status": "crash", RETIRE: True}
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_all_bits()
    serve(handle)
