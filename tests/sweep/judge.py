"""Is a subject compiled as good as eager's? As the zoo asks it, for anything that can be called."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.harness.backend import Counting, eager_random
from tests.harness.compare import DIRECTIONS, outside_limits
from tests.harness.draws import (
    LARGEST,
    NORM,
    NUM_RUNS,
    distance,
    farther_outputs,
    moved_inputs,
    moved_model,
    shaken_inputs,
    shaken_model,
)
from tests.harness.pool import Result
from tests.models.check import widened
from tests.sweep.subject import Call, Subject

Runs = Sequence[list[Tensor]]
FINER = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
# The farthest of n runs is nearer than one more run of eager with probability 1 / (n + 1), and for
# each tensor whose error depends on a branch again: 31 runs of timm's inception_v3, trained in
# channels-last, judged by 13 of each other, are found wrong 14 times in 100. So what is right in
# float64 is held against more of them before it counts as wrong.
NUM_RUNS_IF_FAR = 64
CAPTURE_ALONE, PEER = "aot_eager", "inductor"


def judged(subject: Subject, backend: str) -> Result:
    """pass, or what went wrong, whose it is, and what the peer makes of it."""
    eager = evaluate(subject, copy.deepcopy(subject.model), subject.call)
    result = compared(subject, eager, backend) | {"recipe": subject.recipe}
    if result["status"] == "pass":
        return result
    others = {CAPTURE_ALONE: compared(subject, eager, CAPTURE_ALONE)["status"]}
    if others[CAPTURE_ALONE] != "pass":
        return result | {"whose": "capture", "others": others}
    others[PEER] = compared(subject, eager, PEER)["status"]  # takes minutes: only for what is ours
    return result | {"whose": "ours", "others": others}


def compared(subject: Subject, eager: list[Tensor], backend: str) -> Result:
    try:
        got, num_graphs = compiled_by(backend, subject)
        num_alone = num_graphs
        if num_graphs > 1 and subject.counts_graphs:
            _, num_alone = compiled_by("eager", subject)
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        return {"status": "error", "message": message}
    found = complaints_of(subject, eager, got, backend)
    if num_graphs > num_alone:
        found.append(f"{num_graphs} graphs, Dynamo alone makes {num_alone}")
    status = "wrong" if found else "pass"
    return {"status": status, "message": "; ".join(found)[:500], "num_graphs": num_graphs}


def compiled_by(backend: str, subject: Subject) -> tuple[list[Tensor], int]:
    """Results of the compiled subject, and its number of graphs."""
    torch._dynamo.reset()
    counting = Counting(backend)
    compile_it: Any = functools.partial(torch.compile, backend=counting)
    with eager_random(counting.inner):
        got = subject.run(copy.deepcopy(subject.model), subject.call, compile_it)
    return got, counting.num_graphs


def complaints_of(
    subject: Subject, eager: list[Tensor], got: list[Tensor], backend: str
) -> list[str]:
    """Outputs out of limits. The next wider limits are derived only where the last ones fail:
    eager's own error, then spreads and draws, then runs of eager with other roundings."""
    if len(got) != len(eager):
        return [f"{len(got)} results, eager gives {len(eager)}"]
    exact, is_wide = reference(subject, eager)
    suspects = outside_limits(got, eager, exact)
    if suspects:
        spreads, draws = moved_runs(subject, is_wide)
        suspects = outside_limits(got, eager, exact, spreads, draws=draws)
    if not suspects:
        return []
    runs = [eager, *shaken_runs(subject)]
    found = farther_outputs(suspects, got, exact, runs)
    if not found or not is_wide or is_wrong_in_float64(subject, backend, exact, runs):
        return found
    found = farther_outputs(suspects, got, exact, runs, measures=(NORM,))
    if found:
        runs += shaken_runs(subject, range(NUM_RUNS, NUM_RUNS_IF_FAR))
        found = farther_outputs(suspects, got, exact, runs, measures=(NORM,))
    return found


def is_wrong_in_float64(subject: Subject, backend: str, exact: list[Tensor], runs: Runs) -> bool:
    """Whether a compiled subject is farther from eager in float64 than roundings bring it.

    One ReLU at a tie, in a branch that no run of eager took, moves one row of a gradient. In
    float64 no such tie is near enough, and a part that is wrong or missing shows all the same. So
    this decides about outputs that are as near as eager's in norm, and farther in single elements.
    Kernels for float32 alone are not seen in it, so that norms are limited besides.
    Errors may be as large as those of `runs`, in proportion to the roundings.
    """
    double = replace(subject, model=widened(subject.model, ""), call=wide(subject.call))
    got, _ = compiled_by(backend, double)
    for mine, right, *drawn in zip(got, exact, *runs, strict=True):
        for _, order in (NORM, LARGEST):
            limit = 2 * max(distance(x, right, order) for x in drawn) * FINER
            if not distance(mine, right, order) <= limit:
                return True
    return False


def shaken_runs(subject: Subject, seeds: range = range(NUM_RUNS)) -> list[list[Tensor]]:
    """Eager's results with parameters and inputs moved by roundings of their dtype."""
    return [shaken_run(subject, seed) for seed in seeds]


def reference(subject: Subject, eager: list[Tensor]) -> tuple[list[Tensor], bool]:
    """Float64, and whether it is. For a model that insists on float32 in places, or is not a number
    in float64, eager with moved weights stands in: the compiled model may be about as far from that
    as eager itself is."""
    model, call = subject.model, subject.call
    try:
        exact = evaluate(subject, widened(model, ""), wide(call))
        for e, x in zip(exact, eager, strict=True):
            if e.shape != x.shape or (e.isnan() & ~x.isnan()).any():
                raise ValueError("no reference: float64 gives NaN where eager has a number")
        return exact, True
    except (RuntimeError, ValueError, TypeError):
        return evaluate(subject, moved_model(model, DIRECTIONS[0]), call), False


def moved_runs(subject: Subject, is_wide: bool) -> tuple[Runs, Sequence[tuple[Any, Any]]]:
    """The reference with moved weights and inputs, and eager beside it with the same ones."""
    model, call = subject.model, subject.call
    calls = {way: moved_inputs(call, way) for way in DIRECTIONS}
    runs = [evaluate(subject, moved_model(model, way), calls[way]) for way in DIRECTIONS]
    if not is_wide:
        return runs[1:], ()
    exact = [evaluate(subject, widened(model, way), wide(calls[way])) for way in DIRECTIONS]
    return exact, list(zip(runs, exact, strict=True))


def shaken_run(subject: Subject, seed: int) -> list[Tensor]:
    model = shaken_model(subject.model, seed)
    return evaluate(subject, model, shaken_inputs(subject.call, seed))


def evaluate(subject: Subject, model: Any, call: Call) -> list[Tensor]:
    return subject.run(model, call, lambda function: function)


def wide(call: Call) -> Call:
    def widen(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.detach().double().requires_grad_(x.requires_grad)

    widened_call: Call = pytree.tree_map(widen, call)
    return widened_call
