"""A worker process of `tests.random_programs.run`: one seed a task."""

from __future__ import annotations

import torch

from tests.harness.devices import is_healthy, keep_all_bits
from tests.harness.pool import RETIRE, Result, Task, serve
from tests.random_programs.check import check_program, shrink
from tests.random_programs.kinds import program_of
from tests.random_programs.settings import settings_of, under_settings


def handle(task: Task) -> Result:
    settings = settings_of(task["seed"]) if task.get("settings") == "drawn" else {}
    with under_settings(settings):
        result = checked(task)
    is_fine = result["status"] in ("pass", "skip")
    return (
        result
        if is_fine or not settings
        else {**result, "message": f"{settings}: {result['message']}"}
    )


def checked(task: Task) -> Result:
    program = program_of(task.get("kind", "plain"), task["seed"], task.get("mode", "drawn"))
    backend, device = task["backend"], task["device"]
    verdict = check_program(program, backend, device)
    if verdict.status in ("pass", "skip"):
        return {"status": verdict.status, "message": verdict.message}
    if task["shrink"] and is_healthy(device):
        program = shrink(program, backend, device)
        verdict = check_program(program, backend, device)
    return {
        "status": verdict.status,
        "message": verdict.message,
        "source": program.standalone(),
        RETIRE: not is_healthy(device),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_all_bits()
    serve(handle)
