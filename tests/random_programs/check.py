"""One program against eager, in every size, and the smallest program that still fails."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.harness.backend import compiled
from tests.harness.compare import DIRECTIONS, complaints, cotangent, moved, outside_limits
from tests.harness.devices import all_onto, is_healthy
from tests.harness.draws import NUM_RUNS, farther_outputs, shaken_inputs
from tests.harness.rounding import rounded_at_random
from tests.random_programs.program import Program

MAX_SHRINK_STEPS = 80
# Dynamo and AOTAutograd with no compiler behind them: what goes wrong there is not a compiler's.
CAPTURE_ALONE = "aot_eager"
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """pass, wrong, error, crash when the device is gone for this process, or skip when eager itself
    cannot run the program."""

    status: str
    message: str = ""


def check_program(program: Program, backend: str, device: str = "cpu") -> Verdict:
    inputs, function = program.functions()
    torch._dynamo.reset()
    candidate = compiled(function, backend, dynamic=program.is_dynamic)
    num_checked = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sizes in program.sizes:
            try:
                values = all_onto(inputs(*sizes), device)
                eager = evaluate(program, function, fresh(values))
            except Exception:
                continue  # not every size makes a program that eager runs
            verdict = check_sizes(program, candidate, values, eager)
            if not is_healthy(device):
                return Verdict("crash", f"sizes {sizes}: {verdict.message}")
            if verdict.status != "pass":
                if backend != CAPTURE_ALONE and fails(program, CAPTURE_ALONE, device):
                    return Verdict("skip", "PyTorch's own capture goes wrong")
                return Verdict(verdict.status, f"sizes {sizes}: {verdict.message}")
            num_checked += 1
    return Verdict("pass" if num_checked else "skip")


def fails(program: Program, backend: str, device: str) -> bool:
    return check_program(program, backend, device).status not in ("pass", "skip")


def check_sizes(
    program: Program, candidate: Function, values: list[Any], eager: dict[str, Any]
) -> Verdict:
    try:
        got = evaluate(program, candidate, fresh(values))
    except Exception as error:
        return Verdict("error", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
    if got["aliases"] != eager["aliases"]:
        return Verdict("wrong", f"aliases {got['aliases']}, eager {eager['aliases']}")
    layouts = zip(got["strides"], eager["strides"], strict=True)
    if any(mine != theirs for mine, theirs in layouts if theirs is not None):
        return Verdict("wrong", f"strides {got['strides']}, eager {eager['strides']}")
    found = wrong_values(program, values, got["values"], eager["values"])
    return Verdict("wrong", "; ".join(found)) if found else Verdict("pass")


def wrong_values(
    program: Program, values: list[Any], got: list[Any], eager: list[Any]
) -> list[str]:
    """Outputs out of limits. Wider ones are derived only where the last ones fail: eager's own
    error and spreads, then steps that round at random, then eager with other roundings."""
    eps = program.float_eps()
    exact, *spreads = (exact_of(program, values, eps, way) for way in ("", *DIRECTIONS))
    known = [s for s in spreads if s is not None]
    found = complaints(got, eager, exact, known, eps=eps)
    if not found or exact is None or not program.is_training or len(got) != len(eager):
        return found
    # A network's gradient jumps where a rounding crosses a kink: each step rounds at random.
    known += rounded_at_random(lambda: exact_of(program, values, eps, ""), eps)
    suspects = outside_limits(got, eager, exact, known, eps=eps)
    runs = shaken_runs(program, values) if suspects else []
    return farther_outputs(suspects, got, exact, [eager, *runs])


def shaken_runs(program: Program, values: list[Any]) -> list[list[Any]]:
    _, function = program.functions()
    inputs = (fresh(shaken_inputs(values, seed)) for seed in range(NUM_RUNS))
    return [evaluate(program, function, arguments)["values"] for arguments in inputs]


def evaluate(program: Program, function: Function, arguments: list[Any]) -> dict[str, Any]:
    """Outputs, the inputs afterwards, gradients, and which outputs live in an input's memory."""
    outputs = function(*arguments)
    values = [v for v in arguments if isinstance(v, Tensor)]
    result = [*outputs, *values]
    if program.has_backward:
        result += gradients(outputs, values)
    aliases = [
        (i, j)
        for i, output in enumerate(outputs)
        for j, value in enumerate(values)
        if output.numel()
        and output.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    ]
    return {"values": result, "aliases": aliases, "strides": [steps(o) for o in outputs]}


def steps(x: Tensor) -> list[int] | None:
    """The strides that code behind the compiled function may rely on, to ask for a view of `x`.

    None where elements share memory: a compiler may part them.
    """
    pairs = zip(x.shape, x.stride(), strict=True)
    strides = [(stride, size) for size, stride in pairs if size > 1] if x.numel() else []
    span = 1
    for stride, size in sorted(strides):
        if stride < span:
            return None
        span += stride * (size - 1)
    return [stride for stride, _ in strides]


def gradients(outputs: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    roots = [o for o in outputs if o.requires_grad]
    wanted = [v for v in values if v.requires_grad]
    if not roots or not wanted:
        return []
    seeds = [cotangent(r) for r in roots]
    found = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    return [torch.zeros(()) if f is None else f for f in found]


def exact_of(
    program: Program, values: list[Any], eps: float, direction: str
) -> list[Tensor] | None:
    _, function = program.functions(exact=True)
    try:
        wide = [
            moved(v, eps, direction)
            if isinstance(v, Tensor) and v.is_floating_point()
            else copy.deepcopy(v)
            for v in values
        ]
        return list(evaluate(program, function, wide)["values"])
    except Exception:
        return None


def fresh(values: list[Any]) -> list[Any]:
    """Copies with the same strides; a leaf that wants a gradient still does."""
    return [
        copy.deepcopy(v.detach()).requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v
        for v in values
    ]


def shrink(program: Program, backend: str, device: str = "cpu") -> Program:
    """Take statements away, from the end, as long as the failure stays of the same kind."""
    status = check_program(program, backend, device).status
    steps = 0
    for index in reversed(range(len(program.body))):
        smaller = program.without(index) if index < len(program.body) else None
        steps += 1
        if smaller is None or steps > MAX_SHRINK_STEPS:
            continue
        if check_program(smaller, backend, device).status == status:
            program = smaller
    return with_fewer_outputs(program, backend, device, status)


def with_fewer_outputs(program: Program, backend: str, device: str, status: str) -> Program:
    for name in program.outputs:
        alone = replace(program, outputs=(name,))
        if len(program.outputs) > 1 and check_program(alone, backend, device).status == status:
            return alone
    return program
