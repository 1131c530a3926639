"""A worker process of `tests.models.sweep`: one type of model a task, its forward alone."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.harness.compare import DIRECTIONS, complaints
from tests.harness.devices import keep_all_bits
from tests.harness.draws import moved_model
from tests.harness.pool import RETIRE, Result, Task, serve
from tests.models.check import compiled_by, wide, widened
from tests.models.tiny import Made, NotMade, make, numbers
from tests.models.zoo import Inputs

CAPTURE_ALONE, PEER = "aot_eager", "inductor"
MAX_TYPES = 12  # compiled code and modules grow: a process is for a few
num_done = itertools.count(1)


def handle(task: Task) -> Result:
    return swept(task["model_type"], task["backend"]) | {RETIRE: next(num_done) >= MAX_TYPES}


def swept(model_type: str, backend: str) -> Result:
    """pass, skip, or what went wrong, whose it is, and what the peer makes of it."""
    try:
        made = make(model_type)
    except NotMade as error:
        return {"status": "skip", "message": str(error)}
    eager = evaluate(copy.deepcopy(made.model), made.inputs)
    result = judged(made, eager, backend) | {"recipe": made.recipe, "inputs": sorted(made.inputs)}
    if result["status"] in ("pass", "skip"):
        return result
    others = {name: judged(made, eager, name)["status"] for name in (CAPTURE_ALONE, PEER)}
    whose = "ours" if others[CAPTURE_ALONE] == "pass" else "capture"
    return result | {"whose": whose, "others": others}


def judged(made: Made, eager: list[Tensor], backend: str) -> Result:
    try:
        got, num_graphs = compiled_by(backend, made.model, made.inputs, evaluate)
        num_alone = num_graphs
        if num_graphs > 1:
            _, num_alone = compiled_by("eager", made.model, made.inputs, evaluate)
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        return {"status": "error", "message": message}
    found = complaints_of(made, eager, got)
    if num_graphs > num_alone:
        found.append(f"{num_graphs} graphs, Dynamo alone makes {num_alone}")
    status = "wrong" if found else "pass"
    return {"status": status, "message": "; ".join(found)[:500], "num_graphs": num_graphs}


def complaints_of(made: Made, eager: list[Tensor], got: list[Tensor]) -> list[str]:
    """Against float64. For a model that insists on float32 in places, or is not a number in
    float64, eager with moved weights stands in: the compiled model may be about as far from that as
    eager itself is."""
    try:
        exact = evaluate(widened(made.model, ""), wide(made.inputs))
        if any((e.isnan() & ~x.isnan()).any() for e, x in zip(exact, eager, strict=True)):
            raise ValueError("no reference: float64 gives NaN where eager has a number")
        if not complaints(got, eager, exact):
            return []  # the spread would only widen the limits
        spreads = [evaluate(widened(made.model, way), wide(made.inputs)) for way in DIRECTIONS]
        again = [evaluate(moved_model(made.model, way), made.inputs) for way in DIRECTIONS]
        draws = list(zip(again, spreads, strict=True))
        return complaints(got, eager, exact, spreads, draws=draws)
    except (RuntimeError, ValueError, TypeError):
        moved = (moved_model(made.model, way) for way in DIRECTIONS)
        stand_in, *others = (evaluate(model, made.inputs) for model in moved)
        return complaints(got, eager, stand_in, others)


def evaluate(model: Any, inputs: Inputs) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return numbers(model(**inputs))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    keep_all_bits()
    serve(handle)
