"""One case: the contestants are checked, then take turns, so that the machine's moods hit them all.

What is common to CPU and GPU; a clock says how long one turn took.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import perfuse  # noqa: F401  (a checkout that is not installed makes itself known)
from benchmarks.cases import Case, Problem
from tests.harness.compare import DIRECTIONS, complaints, is_finer, norm_complaints

Step = Callable[[], Any]
Steps = dict[str, Step]
Reading = Callable[[], float]
Clock = Callable[[str, Step], Reading]  # a contestant's name and step -> the time of one call
MIN_ROUNDS = 5
MAX_ROUNDS = 200


def step_of(problem: Problem, backend: str) -> Step:
    """A contestant: `eager`, a backend, or `backend:mode`."""
    if backend == "eager":
        return lambda: problem.step(problem.function)
    name, _, mode = backend.partition(":")
    candidate = torch.compile(problem.function, backend=name, mode=mode or None)
    return lambda: problem.step(candidate)


def copy_step(total_bytes: int) -> Step:
    """Reads half of the bytes and writes the other half: the memory's speed for this much data."""
    source = torch.ones(max(total_bytes // 8, 1))
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def snapshot(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree)


def first_calls(
    problem: Problem, steps: Steps, synchronize: Callable[[], None]
) -> tuple[dict[str, Any], dict[str, float], dict[str, str]]:
    """Results and seconds of each first call; who fails is taken out, with the reason."""
    results, seconds, failures = {}, {}, {}
    for name, step in list(steps.items()):
        problem.restore()
        synchronize()
        began = time.perf_counter()
        try:
            results[name] = snapshot(step())
            synchronize()
            seconds[name] = time.perf_counter() - began
        except Exception as error:  # a contestant that cannot run is a row, not the end
            failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            del steps[name]
    return results, seconds, failures


def wrong_results(case: Case, problem: Problem, results: dict[str, Any]) -> dict[str, str]:
    """Complaints about each compiled result, against eager and a wider float."""
    eager = results["eager"]
    rivals = {name: got for name, got in results.items() if name != "eager"}
    if case.check is not None:
        found = {name: case.check(got, problem.args) for name, got in results.items()}
    elif case.kind == "model" and is_small(eager):
        exact = problem.exact("")
        is_felt = any(is_finer(leaf, eager) for leaf in pytree.tree_leaves(eager))
        spreads = moved_results(problem) if is_felt else []
        found = {name: norm_complaints(got, eager, exact, spreads) for name, got in rivals.items()}
    else:
        exact, spreads = problem.exact(""), moved_results(problem)
        found = {name: complaints(got, eager, exact, spreads) for name, got in rivals.items()}
        if problem.draw is not None and any(found.values()):
            draws = [problem.draw(direction) for direction in DIRECTIONS]
            found = {
                name: complaints(got, eager, exact, spreads, draws=draws)
                for name, got in rivals.items()
            }
    return {name: "; ".join(problems)[:500] for name, problems in found.items() if problems}


def moved_results(problem: Problem) -> list[Any]:
    """The exact results where the arguments are moved by one rounding, where there are any."""
    moved = (problem.exact(direction) for direction in DIRECTIONS)
    return [result for result in moved if result is not None]


def is_small(result: Any) -> bool:
    """A model in half precision: single elements are too noisy to be held against eager's."""
    floats = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    return any(x.dtype in (torch.float16, torch.bfloat16) for x in floats)


def take_turns(steps: Steps, budget_s: float, clock: Clock) -> dict[str, dict[str, float]]:
    """Rounds of one call each; a reading is taken at the end, so that nobody waits in between."""
    readings: dict[str, list[Reading]] = {name: [] for name in steps}
    deadline = time.perf_counter() + budget_s
    num_rounds = 0
    while num_rounds < MIN_ROUNDS or (num_rounds < MAX_ROUNDS and time.perf_counter() < deadline):
        for name, step in steps.items():
            readings[name].append(clock(name, step))
        num_rounds += 1
    times = {name: [reading() for reading in found] for name, found in readings.items()}
    return {
        name: {"best": min(t), "median": statistics.median(t), "rounds": len(t)}
        for name, t in times.items()
    }
