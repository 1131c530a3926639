"""A worker process of `tests.random_programs.run`: one seed a task."""

from __future__ import annotations

import torch

from tests.harness.pool import Result, Task, serve
from tests.random_programs.check import check_program, shrink
from tests.random_programs.generate import from_seed


def handle(task: Task) -> Result:
    program = from_seed(task["seed"])
    verdict = check_program(program, task["backend"])
    if verdict.status in ("pass", "skip"):
        return {"status": verdict.status, "message": ""}
    if task["shrink"]:
        program = shrink(program, task["backend"])
        verdict = check_program(program, task["backend"])
    return {
        "status": verdict.status,
        "message": verdict.message,
        "source": program.standalone(),
    }


if __name__ == "__main__":
    torch.set_num_threads(2)
    serve(handle)
