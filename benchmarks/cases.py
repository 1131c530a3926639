"""A case: a program, its inputs, and what it is expected to be bound by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.harness.compare import cotangent, moved

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """The function that is compiled, and how one step calls it."""

    function: Function
    args: tuple[Any, ...]
    step: Callable[[Function], Any]  # one measured call of eager's or a compiled function
    # The step's results in a wider float, the arguments moved by one rounding of theirs in some
    # direction (tests/harness/compare.py), or None where there is no such thing.
    exact: Callable[[str], Any]
    has_backward: bool = False
    # The step's results in eager and in a wider float, of about the same problem (`draws` there).
    draw: Callable[[str], tuple[Any, Any]] | None = None
    restore: Callable[[], None] = lambda: None  # gives written arguments their first values again


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    kind: str  # "kernel", "model" or "overhead"
    what: str
    build: Callable[[], Problem]
    is_memory_bound: bool = False
    # Where it is not every argument and result once (a table of which some rows are read).
    bytes_moved: int | None = None
    # For random results: what is wrong with them, given the arguments.
    check: Callable[[Any, tuple[Any, ...]], list[str]] | None = None

    def __str__(self) -> str:
        return self.name


def forward_problem(function: Function, args: Sequence[Any], *, mutates: bool = False) -> Problem:
    """With `mutates`, the last argument is written to and belongs to the results."""
    inputs = tuple(args)
    originals = [a.clone() if isinstance(a, Tensor) else a for a in inputs] if mutates else []

    def restore() -> None:
        for value, original in zip(inputs, originals, strict=False):
            value.copy_(original)

    def step(candidate: Function) -> Any:
        with torch.no_grad():
            outputs = candidate(*inputs)
        return (outputs, inputs[-1]) if mutates else outputs

    def exact(direction: str) -> Any:
        restore()
        wide = widened(inputs, direction)
        return wide and forward_problem(function, wide, mutates=mutates).step(function)

    return Problem(function, inputs, step, exact, restore=restore)


def backward_problem(function: Function, args: Sequence[Any]) -> Problem:
    """Forward, and the gradients of every floating input."""
    inputs = tuple(a.detach().requires_grad_() if is_float(a) else a for a in args)
    wanted = [a for a in inputs if is_float(a)]
    seed = cotangent(function(*inputs).detach())

    def step(candidate: Function) -> Any:
        output = candidate(*inputs)
        return (output.detach(), *torch.autograd.grad(output, wanted, seed))

    def exact(direction: str) -> Any:
        wide = widened(inputs, direction)
        return wide and backward_problem(function, wide).step(function)

    return Problem(function, inputs, step, exact, has_backward=True)


def widened(args: Sequence[Any], direction: str) -> list[Any] | None:
    """The arguments in float64; None where a float8 among them says what the case is about."""
    if any(is_float(a) and a.element_size() == 1 for a in args):
        return None
    return [
        moved(a.detach(), torch.finfo(a.dtype).eps, direction) if is_float(a) else a for a in args
    ]


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def num_bytes(*trees: Any) -> int:
    """Bytes of every tensor in the trees, each counted once."""
    tensors = {id(t): t for t in pytree.tree_leaves(trees) if isinstance(t, Tensor)}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def bytes_moved(case: Case, problem: Problem, results: Any) -> int:
    """The least a program can move: each argument and result once.

    A backward pass reads the arguments again, and the gradient of the output.
    """
    if case.bytes_moved is not None:
        return case.bytes_moved
    once = num_bytes(problem.args, results)
    return once + num_bytes(problem.args, results[0]) if problem.has_backward else once
