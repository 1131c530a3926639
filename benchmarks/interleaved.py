"""One case in one process: the contestants take turns, so that the machine's moods hit them all.

python -m benchmarks.interleaved CASE --backends eager inductor perfuse --budget 6
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.cases import Case, Problem, num_bytes
from benchmarks.catalogue import catalogue
from tests.harness.compare import complaints

MIN_ROUNDS = 5
MAX_ROUNDS = 200
MIN_BATCH_S = 0.002  # shorter calls are timed several at a time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--backends", nargs="+", default=["eager", "inductor", "perfuse"])
    parser.add_argument("--budget", type=float, default=6.0, help="seconds of measuring")
    arguments = parser.parse_args()
    print(json.dumps(measure(catalogue()[arguments.case], arguments.backends, arguments.budget)))


def measure(case: Case, backends: Sequence[str], budget_s: float) -> dict[str, Any]:
    problem = case.build()
    steps: dict[str, Callable[[], Any]] = {}
    failures: dict[str, str] = {}
    for backend in backends:
        steps[backend] = step_of(problem, backend)
    eager_result = pytree.tree_map(snapshot, steps["eager"]())
    exact = exact_result(case, problem)
    for backend in [b for b in backends if b != "eager"]:
        try:
            found = complaints(pytree.tree_map(snapshot, steps[backend]()), eager_result, exact)
        except Exception as error:  # a contestant that cannot run is a row, not the end
            found = [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]
            del steps[backend]
        if found:
            failures[backend] = "; ".join(found)[:500]
    moved = num_bytes(problem.args, eager_result)
    if case.is_memory_bound:
        steps["copy"] = copy_step(moved)
    return {
        "name": case.name,
        "kind": case.kind,
        "what": case.what,
        "bytes": moved if case.is_memory_bound else None,
        "failures": failures,
        "times_ms": take_turns(steps, budget_s),
    }


def step_of(problem: Problem, backend: str) -> Callable[[], Any]:
    if backend == "eager":
        return lambda: problem.step(problem.function)
    candidate = torch.compile(problem.function, backend=backend)
    return lambda: problem.step(candidate)


def copy_step(total_bytes: int) -> Callable[[], Any]:
    """Reads half of the bytes and writes the other half: the memory's speed for this much data."""
    source = torch.ones(max(total_bytes // 8, 1))
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def snapshot(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def exact_result(case: Case, problem: Problem) -> Any:
    """The kernel in float64; models are held against eager by the error of float32 alone."""
    if case.kind == "model":
        return exact_model_result(case)
    if any(isinstance(a, Tensor) and a.element_size() == 1 for a in problem.args):
        return None
    wide = [a.double() if is_float(a) else a for a in problem.args]
    with torch.no_grad():
        outputs = problem.function(*wide)
    if not case.name.endswith("_fb"):
        return outputs
    leaves = [w.detach().requires_grad_() if is_float(w) else w for w in wide]
    outputs = problem.function(*leaves)
    wanted = [x for x in leaves if is_float(x)]
    return (outputs.detach(), *torch.autograd.grad(outputs, wanted, torch.ones_like(outputs)))


def exact_model_result(case: Case) -> Any:
    problem = case.build()
    original: Any = problem.function
    model = copy.deepcopy(original).double()
    inputs = {k: v.double() if is_float(v) else v for k, v in problem.args[0].items()}
    step = problem.step.func  # type: ignore[attr-defined]
    return step(model, inputs, model)


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def take_turns(steps: dict[str, Callable[[], Any]], budget_s: float) -> dict[str, dict[str, float]]:
    batches = {name: batch_size(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    deadline = time.perf_counter() + budget_s
    num_rounds = 0
    while num_rounds < MIN_ROUNDS or (num_rounds < MAX_ROUNDS and time.perf_counter() < deadline):
        for name, step in steps.items():
            times[name].append(timed(step, batches[name]))
        num_rounds += 1
    return {
        name: {"best": min(t), "median": statistics.median(t), "rounds": len(t)}
        for name, t in times.items()
    }


def batch_size(step: Callable[[], Any]) -> int:
    for _ in range(2):
        step()
    once_s = timed(step, 1) / 1e3
    return max(1, int(MIN_BATCH_S / max(once_s, 1e-7)))


def timed(step: Callable[[], Any], batch: int) -> float:
    """Milliseconds a call."""
    began = time.perf_counter()
    for _ in range(batch):
        step()
    return (time.perf_counter() - began) / batch * 1e3


if __name__ == "__main__":
    main()
