"""Is a subject compiled as good as eager's? As the zoo asks it, for anything that can be called."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.harness.backend import Counting, eager_random
from tests.harness.compare import DIRECTIONS, complaints
from tests.harness.draws import moved_model
from tests.harness.pool import Result
from tests.models.check import widened
from tests.sweep.subject import Call, Subject

CAPTURE_ALONE, PEER = "aot_eager", "inductor"


def judged(subject: Subject, backend: str) -> Result:
    """pass, or what went wrong, whose it is, and what the peer makes of it."""
    eager = evaluate(subject, copy.deepcopy(subject.model), subject.call)
    result = compared(subject, eager, backend) | {"recipe": subject.recipe}
    if result["status"] == "pass":
        return result
    others = {name: compared(subject, eager, name)["status"] for name in (CAPTURE_ALONE, PEER)}
    whose = "ours" if others[CAPTURE_ALONE] == "pass" else "capture"
    return result | {"whose": whose, "others": others}


def compared(subject: Subject, eager: list[Tensor], backend: str) -> Result:
    try:
        got, num_graphs = compiled_by(backend, subject)
        num_alone = num_graphs
        if num_graphs > 1 and subject.counts_graphs:
            _, num_alone = compiled_by("eager", subject)
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        return {"status": "error", "message": message}
    found = complaints_of(subject, eager, got)
    if num_graphs > num_alone:
        found.append(f"{num_graphs} graphs, Dynamo alone makes {num_alone}")
    status = "wrong" if found else "pass"
    return {"status": status, "message": "; ".join(found)[:500], "num_graphs": num_graphs}


def compiled_by(backend: str, subject: Subject) -> tuple[list[Tensor], int]:
    """What the compiled subject gives, and of how many graphs."""
    torch._dynamo.reset()
    counting = Counting(backend)
    compile_it: Any = functools.partial(torch.compile, backend=counting)
    with eager_random(counting.inner):
        got = subject.run(copy.deepcopy(subject.model), subject.call, compile_it)
    return got, counting.num_graphs


def complaints_of(subject: Subject, eager: list[Tensor], got: list[Tensor]) -> list[str]:
    """Against float64. For a model that insists on float32 in places, or is not a number in
    float64, eager with moved weights stands in: the compiled model may be about as far from that as
    eager itself is."""
    model, call = subject.model, subject.call
    try:
        exact = evaluate(subject, widened(model, ""), wide(call))
        if any((e.isnan() & ~x.isnan()).any() for e, x in zip(exact, eager, strict=True)):
            raise ValueError("no reference: float64 gives NaN where eager has a number")
        if not complaints(got, eager, exact):
            return []  # the spread would only widen the limits
        spreads = [evaluate(subject, widened(model, way), wide(call)) for way in DIRECTIONS]
        again = [evaluate(subject, moved_model(model, way), call) for way in DIRECTIONS]
        draws = list(zip(again, spreads, strict=True))
        return complaints(got, eager, exact, spreads, draws=draws)
    except (RuntimeError, ValueError, TypeError):
        moved = (moved_model(model, way) for way in DIRECTIONS)
        stand_in, *others = (evaluate(subject, m, call) for m in moved)
        return complaints(got, eager, stand_in, others)


def evaluate(subject: Subject, model: Any, call: Call) -> list[Tensor]:
    return subject.run(model, call, lambda function: function)


def wide(call: Call) -> Call:
    def widen(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.detach().double().requires_grad_(x.requires_grad)

    widened_call: Call = pytree.tree_map(widen, call)
    return widened_call
