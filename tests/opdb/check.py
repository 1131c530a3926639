"""One row against eager: the same values, or the same kind of error."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.harness.backend import compiled, eager_random
from tests.harness.compare import DIRECTIONS, Tolerance, complaints, cotangent, moved
from tests.harness.devices import is_healthy
from tests.harness.rounding import rounded_at_random
from tests.opdb.operands import placed
from tests.opdb.rows import DTYPES, Row, operator_of, tolerance_of

# What they return is memory nobody has written: only its shape, dtype and strides mean anything.
UNINITIALISED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
UNINITIALISED |= {"empty_permuted", "resize_", "resize_as_"}
# What they return depends on the storage around an operand, which the float64 reference has not.
STORAGE_READERS = {"as_strided", "as_strided_copy", "as_strided_scatter", "resize_", "resize_as_"}
SEED = 1234

Call = tuple[tuple[Any, ...], dict[str, Any]]
Program = Callable[[list[Call]], Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """pass, wrong (another value), error (raised), crash (the device is gone for this process),
    capture (Dynamo's own failure), skip."""

    status: str
    message: str = ""
    num_left: int = 0  # samples that were not looked at


def check_row(
    row: Row,
    backend: str,
    num_samples: int,
    device: str = "cpu",
    *,
    first: int = 0,
    most: int | None = None,
) -> Outcome:
    """The samples from `first` on, at most `most` of them; what is left is counted."""
    op = operator_of(row)
    with warnings.catch_warnings(), eager_random(backend):
        warnings.simplefilter("ignore")
        calls = sample_calls(op, DTYPES[row.dtype], row.mode, num_samples, device)[first:]
        calls = placed(calls, row.operands)
        outcome = check_samples(row, calls[:most], backend, device)
    return replace(outcome, num_left=max(0, len(calls) - most) if most is not None else 0)


def check_samples(row: Row, calls: list[Call], backend: str, device: str) -> Outcome:
    """All samples in one compiled program; one by one only when that fails."""
    op = operator_of(row)
    good, raising = split_by_eager(row, op, calls)
    if not is_healthy(device):
        return Outcome("skip", "eager itself breaks the device")
    if not good and not raising:
        return Outcome("skip", "no sample runs in eager")
    if good:
        outcome = check_calls(row, op, good, backend)
        if not is_healthy(device):
            return Outcome("crash", outcome.message)
        if outcome.status != "pass" and len(good) > 1:
            outcome = first_failure(row, op, good, backend)
        if outcome.status != "pass":
            return blame(row, op, good, backend, outcome)
    return check_raising(op, raising, backend)


def sample_calls(
    op: Any, dtype: torch.dtype, mode: str, num_samples: int, device: str
) -> list[Call]:
    torch.manual_seed(SEED)
    needs_grad = mode == "backward"
    samples = op.sample_inputs(device, dtype, requires_grad=needs_grad)
    drawn = itertools.islice(samples, 4 * num_samples + 8 if num_samples else None)
    calls = [((s.input, *s.args), dict(s.kwargs)) for s in drawn]
    # Few samples: those with elements in them come first, they can be wrong.
    return sorted(calls, key=is_empty)[: num_samples or None]


def is_empty(call: Call) -> bool:
    return any(t.numel() == 0 for t in tensors_of(call))


def split_by_eager(row: Row, op: Any, calls: list[Call]) -> tuple[list[Call], list[Call]]:
    good, raising = [], []
    for call in calls:
        try:
            torch.manual_seed(SEED)
            evaluate(row, program_of(op), [fresh(call)])
            good.append(call)
        except Exception:
            raising.append(call)
    return good, raising


def program_of(op: Any) -> Program:
    function = op.op

    def program(calls: list[Call]) -> Any:
        return [function(*args, **kwargs) for args, kwargs in calls]

    return program


def evaluate(row: Row, program: Program, calls: list[Call]) -> Any:
    """Outputs and mutated inputs, or outputs and gradients."""
    torch.manual_seed(SEED)
    outputs = program(calls)
    if row.mode == "forward":
        return outputs, tensors_of(calls)
    return outputs, gradients(outputs, calls)


def gradients(outputs: Any, calls: list[Call]) -> list[Tensor | None]:
    inputs = [t for t in tensors_of(calls) if t.requires_grad]
    roots = [t for t in tensors_of(outputs) if t.requires_grad]
    if not inputs or not roots:
        return []
    seeds = [cotangent(t) for t in roots]
    return list(torch.autograd.grad(roots, inputs, seeds, allow_unused=True))


def check_calls(row: Row, op: Any, calls: list[Call], backend: str) -> Outcome:
    eager = evaluate(row, program_of(op), [fresh(c) for c in calls])
    torch._dynamo.reset()
    try:
        got = evaluate(row, compiled(program_of(op), backend), [fresh(c) for c in calls])
    except Exception as error:
        return Outcome("error", f"{type(error).__name__}: {first_lines(error)}")
    if op.name in UNINITIALISED:
        got, eager = shapes_of(got[0]), shapes_of(eager[0])
    exact, spreads = references(row, op, calls)
    found = complaints(got, eager, exact, spreads, stated(op, row))
    if found and exact is not None:
        spreads += rounded_at_random(
            lambda: exact_of(row, op, calls, 0.0, ""), torch.finfo(DTYPES[row.dtype]).eps
        )
        found = complaints(got, eager, exact, spreads, stated(op, row))
    return Outcome("wrong", "; ".join(found)[:600]) if found else Outcome("pass")


def first_failure(row: Row, op: Any, calls: list[Call], backend: str) -> Outcome:
    for i, call in enumerate(calls):
        outcome = check_calls(row, op, [call], backend)
        if outcome.status != "pass":
            return Outcome(outcome.status, f"sample {i} {summary(call)}: {outcome.message}")
    return Outcome("wrong", "the samples pass alone and fail together")


def blame(row: Row, op: Any, calls: list[Call], backend: str, outcome: Outcome) -> Outcome:
    """A failure that Dynamo shows without any compiler behind it is not the backend's."""
    if backend == "eager" or all(
        check_calls(row, op, [call], "eager").status == "pass" for call in calls
    ):
        return outcome
    return Outcome("capture", outcome.message)


def check_raising(op: Any, calls: list[Call], backend: str) -> Outcome:
    """Where eager raises, so must we, and a user's `except` has to keep working."""
    for call in calls[:1]:
        theirs = error_of(program_of(op), call)
        torch._dynamo.reset()
        mine = error_of(compiled(program_of(op), backend), call)
        if theirs is not None and mine is None:
            return Outcome("wrong", f"no error, eager raises {type(theirs).__name__}")
    return Outcome("pass")


def error_of(program: Program, call: Call) -> Exception | None:
    try:
        program([fresh(call)])
    except Exception as error:
        return error
    return None


def references(row: Row, op: Any, calls: list[Call]) -> tuple[Any, list[Any]]:
    """The float64 evaluation, and two more with inputs moved by one rounding of the dtype."""
    dtype = DTYPES[row.dtype]
    is_unlike = row.operands != "dense" and op.name in STORAGE_READERS
    if not dtype.is_floating_point or op.name in UNINITIALISED or is_unlike:
        return None, []
    eps = torch.finfo(dtype).eps
    exact, *spreads = (exact_of(row, op, calls, eps, way) for way in ("", *DIRECTIONS))
    return exact, [s for s in spreads if s is not None]


def exact_of(row: Row, op: Any, calls: list[Call], eps: float, direction: str) -> Any:
    def widen(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return moved(x, eps, direction)
        return torch.float64 if x in (torch.float32, torch.float16, torch.bfloat16) else x

    try:
        wide = pytree.tree_map(widen, calls)
        return evaluate(row, program_of(op), wide)
    except Exception:
        return None


def stated(op: Any, row: Row) -> Tolerance | None:
    return tolerance_of(op, DTYPES[row.dtype])


def fresh(call: Call) -> Call:
    """The call on memory of its own, strides and aliases kept."""
    memo: dict[int, Any] = {}

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in memo:
            memo[id(x)] = copy.deepcopy(x.detach(), memo).requires_grad_(x.requires_grad)
        return memo[id(x)]

    return pytree.tree_map(copied, call)  # type: ignore[no-any-return]


def tensors_of(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def shapes_of(tree: Any) -> list[Any]:
    return [(list(t.shape), str(t.dtype), list(t.stride())) for t in tensors_of(tree)]


def summary(call: Call) -> str:
    def short(x: Any) -> Any:
        return f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, Tensor) else x

    args, kwargs = pytree.tree_map(short, call)
    return f"args={args} kwargs={kwargs}"[:300]


def first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
