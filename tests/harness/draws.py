"""Eager's error drawn again: the same model, its parameters moved by roundings.

Moving by one rounding (`moved_model`) measures what a limit is derived from where results follow
their inputs smoothly. Deep networks in training do not: a ReLU, a pooling or a comparison near a
tie takes the other branch for a last bit, and every gradient upstream jumps. A backward-stable
program gives the exact result of inputs moved by a few roundings, whatever branches those take. So
eager is run with parameters and inputs moved at random by `NUM_SPREADS` roundings, and a tensor of
results may be about as far from the exact one as the farthest of these runs (`farther_than`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.harness.compare import NUM_SPREADS, dense, metadata_complaint, moved, widen

T = TypeVar("T")
NUM_RUNS = 12
NORM, LARGEST = ("norm", 2.0), ("largest", float("inf"))
Measures = Sequence[tuple[str, float]]  # a name, and the order of a norm


def moved_model(model: nn.Module, direction: str) -> nn.Module:
    """A copy whose parameters are moved, and rounded to their dtype again."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.is_floating_point():
                eps = torch.finfo(parameter.dtype).eps
                parameter.copy_(moved(parameter, eps, direction))
    return other


def shaken_model(model: nn.Module, seed: int) -> nn.Module:
    """A copy whose parameters are moved at random by at most `NUM_SPREADS` roundings."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.is_floating_point():
                parameter.copy_(shaken(parameter, generator))
    return other


def shaken(x: Tensor, generator: torch.Generator) -> Tensor:
    draw = 2 * torch.rand(x.shape, generator=generator) - 1
    return x * (1 + NUM_SPREADS * torch.finfo(x.dtype).eps * draw.to(x.device))


def moved_inputs(tree: T, direction: str) -> T:
    """The inputs moved by one rounding, and rounded to their dtype again."""
    return each_input(tree, lambda x: moved(x, torch.finfo(x.dtype).eps, direction))


def shaken_inputs(tree: T, seed: int) -> T:
    generator = torch.Generator().manual_seed(seed)
    return each_input(tree, lambda x: shaken(x, generator))


def each_input(tree: T, move: Callable[[Tensor], Tensor]) -> T:
    """The tree with its floats moved, but for whole numbers: masks, places and counts are exact."""

    def other(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        old = x.detach()
        new = torch.where(old == old.round(), old, move(old).to(x.dtype))
        return new.requires_grad_(x.requires_grad)

    result: T = pytree.tree_map(other, tree)
    return result


def farther_outputs(
    suspects: dict[int, str],
    got: list[Any],
    exact: list[Any],
    runs: Sequence[list[Any]],
    measures: Measures = (NORM, LARGEST),
) -> list[str]:
    """Complaints about the suspected outputs that are farther from exact than any run of eager."""
    scale = max((rms(x) for x in exact if isinstance(x, Tensor) and x.numel()), default=0.0)
    found = []
    for i, problem in suspects.items():
        mine, drawn = got[i], [run[i] for run in runs]
        is_float = isinstance(mine, Tensor) and mine.is_floating_point()
        if not is_float or mine.shape != exact[i].shape:
            found.append(f"output {i}: {problem}")
        elif (widen(drawn[0]).isnan() & ~exact[i].isnan()).any():
            continue  # eager's own result is wrong: nothing here says what is right
        elif farther := farther_than(mine, exact[i], drawn, scale, measures):
            found.append(f"output {i}: {problem}; {farther}")
    return found


def rms(x: Tensor) -> float:
    return float(widen(dense(x)).abs().square().mean()) ** 0.5


def farther_than(
    got: Tensor,
    exact: Tensor,
    runs: Sequence[Tensor],
    scale: float,
    measures: Measures = (NORM, LARGEST),
) -> str | None:
    """The complaint about a tensor that is farther from the exact one than any run of eager.

    In norm and in its worst element, each at most twice the farthest run: a part that is wrong or
    missing shows in one of them. What is not a number in `got` alone is farther than anything.
    A tensor smaller than eager's errors in it is zero but for rounding, as is the gradient of a
    bias before a batch norm: it may be a rounding of the other results, which `scale` is the size
    of.
    """
    if problem := metadata_complaint(got, runs[0]):
        return problem
    noise = torch.finfo(got.dtype).eps * scale * got.numel() ** 0.5
    for name, order in measures:
        mine, *theirs = (distance(x, exact, order) for x in (got, *runs))
        size = distance(exact, torch.zeros_like(exact), order)
        limit = 2 * max(theirs) + (noise if size <= max(theirs) else 0.0)
        if not mine <= limit:
            return f"{name} of the error {mine:.3g}, limit of {len(runs)} eager runs {limit:.3g}"
    return None


def distance(x: Tensor, exact: Tensor, order: float) -> float:
    difference = widen(dense(x)) - widen(dense(exact))
    return float(torch.linalg.vector_norm(difference, order))
