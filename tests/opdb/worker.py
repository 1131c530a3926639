"""A worker process of `tests.opdb.run`: one row a task, or some samples of a long one."""

from __future__ import annotations

import torch

from tests.harness.devices import is_healthy, keep_all_bits
from tests.harness.pool import RETIRE, Result, Task, serve
from tests.opdb.check import check_row
from tests.opdb.rows import Row


def handle(task: Task) -> Result:
    row = Row(task["op"], task["dtype"], task["mode"], task.get("operands", "dense"))
    device = task["device"]
    part = {"first": task.get("first", 0), "most": task.get("most")}
    outcome = check_row(row, task["backend"], task["samples"], device, **part)
    found = {"status": outcome.status, "message": outcome.message, "num_left": outcome.num_left}
    return {**found, RETIRE: not is_healthy(device)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_all_bits()
    serve(handle)
