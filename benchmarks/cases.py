"""A case: a program, its inputs, and what it is expected to be bound by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is compiled (`function`), and how one step calls it."""

    function: Function
    args: tuple[Any, ...]
    step: Callable[[Function], Any]  # one measured call of eager's or a compiled function


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    kind: str  # "kernel", "model" or "overhead"
    what: str
    build: Callable[[], Problem]
    is_memory_bound: bool = False

    def __str__(self) -> str:
        return self.name


def forward_problem(function: Function, args: Sequence[Any]) -> Problem:
    inputs = tuple(args)

    def step(candidate: Function) -> Any:
        with torch.no_grad():
            return candidate(*inputs)

    return Problem(function, inputs, step)


def backward_problem(function: Function, args: Sequence[Any]) -> Problem:
    """Forward, and the gradients of every floating input."""
    inputs = tuple(
        a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in args
    )
    wanted = [a for a in inputs if isinstance(a, Tensor) and a.requires_grad]
    seed = torch.ones_like(function(*inputs))

    def step(candidate: Function) -> Any:
        output = candidate(*inputs)
        return (output.detach(), *torch.autograd.grad(output, wanted, seed))

    return Problem(function, inputs, step)


def num_bytes(*trees: Any) -> int:
    """Bytes of every tensor in the trees, each counted once."""
    tensors = {id(t): t for t in pytree.tree_leaves(trees) if isinstance(t, Tensor)}
    return sum(t.numel() * t.element_size() for t in tensors.values())
