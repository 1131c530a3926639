"""Is a compiled result as good as eager's?

Tolerances are derived, never picked. `exact` is the same program in float64; the limit for an
element is twice the largest error that eager itself makes, or may be expected to make, a few units
in the last place of the exact value, and a few times the `spread`: how far the exact value moves
when the inputs move by one rounding of their dtype. The spread is what a backward-stable algorithm
may cost, and it keeps cancellation from looking like a wrong kernel.

The largest error of one run of eager is one draw: another order of the same sums draws another. The
root of the mean square over all elements is far steadier, and the largest of n errors of that size
is expected below sqrt(2 ln 2n) times it where their tails are no longer than a normal
distribution's. So that counts where eager's own largest was a lucky one.

Elements differ in size, and the one that is largest by far may be the lucky one. Where a model
fails by such an element, eager's error is drawn again (`draws`): eager and float64 with parameters
moved by one rounding, which are other roundings of about the same program. The largest error of
all counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# The vector math states its bounds in ulps (at most 2); two such steps make a composed function.
NUM_ULPS = 4
# A square feels one rounding of a mean and one of a difference twice each.
NUM_SPREADS = 4


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Used against eager itself, where no float64 reference exists."""

    rtol: float
    atol: float


@dataclass(frozen=True, slots=True)
class Reference:
    """References that one output is compared with, besides eager."""

    exact: Tensor | None = None
    spreads: list[Tensor] = field(default_factory=list)
    fallback: Tolerance | None = None
    eps: float = 0.0
    draws: list[Tensor] = field(default_factory=list)  # errors of eager where it ran again


DEFAULT_TOLERANCES = {
    torch.float64: Tolerance(1e-7, 1e-7),
    torch.complex128: Tolerance(1e-7, 1e-7),
    torch.float32: Tolerance(1.3e-6, 1e-5),
    torch.complex64: Tolerance(1.3e-6, 1e-5),
    torch.float16: Tolerance(1e-3, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, 1e-5),
}


# Nothing is more exact than these: they are held against eager itself.
WIDEST = (torch.float64, torch.complex128)
DIRECTIONS = ("up", "apart")


def leaves(tree: Any) -> list[Any]:
    """Tensors and plain values of a nested result, in a fixed order."""
    return pytree.tree_leaves(tree)


def complaints(
    got: Any,
    eager: Any,
    exact: Any = None,
    spreads: Sequence[Any] = (),
    fallback: Tolerance | None = None,
    eps: float = 0.0,
    draws: Sequence[tuple[Any, Any]] = (),
) -> list[str]:
    """Complaints about `got`, in words; an empty list is a pass.

    `eps` is the coarsest rounding on the way, where that is coarser than the output's own dtype.
    A draw is what eager and float64 give for a program that is about the same.
    """
    if len(leaves(got)) != len(leaves(eager)):
        return [f"{len(leaves(got))} outputs, eager gives {len(leaves(eager))}"]
    found = outside_limits(got, eager, exact, spreads, fallback, eps, draws)
    return [f"output {i}: {problem}" for i, problem in found.items()]


def outside_limits(
    got: Any,
    eager: Any,
    exact: Any = None,
    spreads: Sequence[Any] = (),
    fallback: Tolerance | None = None,
    eps: float = 0.0,
    draws: Sequence[tuple[Any, Any]] = (),
) -> dict[int, str]:
    """The places of the outputs outside their limits, and what is wrong with each."""
    eager_leaves = leaves(eager)
    exact_leaves = aligned(exact, eager_leaves)
    spread_leaves = [aligned(s, eager_leaves) for s in spreads]
    drawn_leaves = [[aligned(tree, eager_leaves) for tree in draw] for draw in draws]
    found = {}
    for i, (g, e) in enumerate(zip(leaves(got), eager_leaves, strict=True)):
        moved = [s[i] for s in spread_leaves if s[i] is not None]
        errors = [errors_of(mine[i], exact[i]) for mine, exact in drawn_leaves]
        drawn = [error for error in errors if error is not None]
        problem = leaf_complaint(g, e, Reference(exact_leaves[i], moved, fallback, eps, drawn))
        if problem:
            found[i] = problem
    return found


def assert_as_good_as_eager(
    got: Any, eager: Any, exact: Any = None, spreads: Sequence[Any] = ()
) -> None:
    found = complaints(got, eager, exact, spreads)
    assert not found, "\n".join(found)


def norm_complaints(got: Any, eager: Any, exact: Any, spreads: Sequence[Any] = ()) -> list[str]:
    """The same question for a whole model in a small float: norms of errors, a tensor at a time.

    At most twice eager's error and one rounding of the tensor itself, which is never less than half
    an ulp of each element; a gradient that is zero in exact arithmetic is noise, as large as the
    rounding of the others. A result finer than what it is computed from (a float32 loss of bfloat16
    logits) may move by a few spreads as well: its own rounding says nothing of those on the way,
    and where it is one number, eager's error is one draw, as likely near zero as not.
    """
    triples = list(zip(leaves(got), leaves(eager), leaves(exact), strict=True))
    moved_leaves = [leaves(spread) for spread in spreads]
    count = sum(e.numel() for _, e, _ in triples)
    power = sum(float(widen(x).square().sum()) for _, _, x in triples)
    found = []
    for i, (g, e, x) in enumerate(triples):
        problem = metadata_complaint(g, e)
        error, theirs = distance(g, x), distance(e, x)
        common = (power / count * e.numel()) ** 0.5
        limit = 2 * theirs + torch.finfo(e.dtype).eps * max(float(widen(x).norm()), common)
        if is_finer(e, eager):
            limit += NUM_SPREADS * sum(distance(moved[i], x) for moved in moved_leaves)
        if problem or not error <= limit:
            found.append(f"output {i}: {problem or f'error {error:.3g}, limit {limit:.3g}'}")
    return found


def distance(a: Tensor, b: Tensor) -> float:
    return float((widen(a) - widen(b)).norm())


def is_finer(result: Tensor, results: Any) -> bool:
    """Whether a result has a finer dtype than others, with which it was computed."""
    floats = [x for x in leaves(results) if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.finfo(result.dtype).eps < max(torch.finfo(x.dtype).eps for x in floats)


def aligned(tree: Any, eager_leaves: list[Any]) -> list[Any]:
    """The reference's leaves, or None wherever the reference took another shape than eager."""
    nothing = [None] * len(eager_leaves)
    if tree is None:
        return nothing
    found = leaves(tree)
    if len(found) != len(eager_leaves):
        return nothing
    return [
        f if isinstance(f, Tensor) and isinstance(e, Tensor) and f.shape == e.shape else None
        for f, e in zip(found, eager_leaves, strict=True)
    ]


def leaf_complaint(got: Any, eager: Any, reference: Reference) -> str | None:
    if not isinstance(eager, Tensor) or not isinstance(got, Tensor):
        return plain_complaint(got, eager)
    problem = metadata_complaint(got, eager)
    if problem or eager.numel() == 0:
        return problem
    got, eager = dense(got), dense(eager)
    if not (eager.is_floating_point() or eager.is_complex()):
        return None if torch.equal(got, eager) else describe(got, eager)
    finest = torch.finfo(eager.dtype).eps
    if reference.exact is not None and (eager.dtype not in WIDEST or reference.eps > finest):
        truth = widen(dense(reference.exact))
        errors = (widen(eager) - truth).abs()
        worst, scale = largest_finite(errors), largest_finite(truth.abs())
        eps = max(finest, reference.eps)
        farthest = scale * eps**0.5
        if worst <= farthest:
            # One rounding of the result itself is bounded: anything beyond it is a matter of luck.
            beyond = (errors - eps * truth.abs()).clamp_min(0.0)
            drawn = (w for w in map(largest_finite, reference.draws) if w <= farthest)
            worst = max(worst, expected_largest(beyond), *drawn)
            return outside(got, eager, truth, limit_around(truth, worst, eager.dtype, reference))
        # An eager this far from float64 took another branch somewhere (a rounding, a comparison):
        # each element may then follow eager, or be as near to the exact value as eager's is.
        limit = limit_around(truth, errors, eager.dtype, reference)
        got = torch.where((widen(got) - truth).abs() <= limit, eager, got)
    tolerance = reference.fallback or DEFAULT_TOLERANCES.get(eager.dtype, Tolerance(0.0, 0.0))
    limit = tolerance.atol + tolerance.rtol * widen(eager).abs()
    return outside(got, eager, widen(eager), limit)


def errors_of(eager: Any, exact: Any) -> Tensor | None:
    if not isinstance(eager, Tensor) or not isinstance(exact, Tensor):
        return None
    return (widen(dense(eager)) - widen(dense(exact))).abs()


def plain_complaint(got: Any, eager: Any) -> str | None:
    if type(got) is not type(eager):
        return f"is a {type(got).__name__}, eager gives a {type(eager).__name__}"
    if isinstance(eager, float):
        return leaf_complaint(torch.tensor(got), torch.tensor(eager), Reference())
    return None if got == eager else f"{got!r}, eager gives {eager!r}"


def metadata_complaint(got: Tensor, eager: Tensor) -> str | None:
    for what in ("shape", "dtype", "device", "layout", "requires_grad"):
        mine, theirs = getattr(got, what), getattr(eager, what)
        if mine != theirs:
            return f"{what} {mine}, eager gives {theirs}"
    return None


def limit_around(
    truth: Tensor, error: float | Tensor, dtype: torch.dtype, reference: Reference
) -> Tensor:
    finfo = torch.finfo(dtype)
    # A float8 is the rounding of something wider: it may fall to the neighbour, no further.
    num_ulps = 1 if dtype.itemsize == 1 else NUM_ULPS
    limit = 2 * error + num_ulps * max(finfo.eps, reference.eps) * truth.abs() + finfo.tiny
    # The reference is rounded too: a sum that cancels in it leaves some of what was summed.
    limit = limit + num_ulps * torch.finfo(torch.float64).eps * largest_finite(truth.abs())
    for spread in reference.spreads:
        limit = limit + NUM_SPREADS * (widen(dense(spread)) - truth).abs().nan_to_num(0.0, 0.0, 0.0)
    return limit


def outside(got: Tensor, eager: Tensor, truth: Tensor, limit: Tensor) -> str | None:
    """The worst element outside its limit; a value that is not finite has to be eager's own."""
    mine, theirs = widen(got), widen(eager)
    if bool(((mine - truth).abs() <= limit).all()):
        return None
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    distance = (mine - truth).abs()
    bad = ~same & ~(distance <= limit)
    if not bool(bad.any()):
        return None
    excess = torch.where(bad, (distance / limit).nan_to_num(float("inf"), float("inf")), 0.0)
    at = int(excess.reshape(-1).argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), got.shape))
    return (
        f"{int(bad.sum())} of {bad.numel()} elements wrong, worst at {place}: "
        f"{got[place].item()!r}, eager {eager[place].item()!r}, exact {truth[place].item()!r}, "
        f"limit {limit.expand_as(truth)[place].item():.3g}"
    )


def describe(got: Tensor, eager: Tensor) -> str:
    bad = got != eager
    at = int(bad.reshape(-1).int().argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), got.shape))
    return (
        f"{int(bad.sum())} of {bad.numel()} elements differ, first at {place}: "
        f"{got[place].item()!r}, eager {eager[place].item()!r}"
    )


def cotangent(output: Tensor) -> Tensor:
    """Fixed numbers of both signs, the same in every dtype that can hold halves."""
    count = torch.arange(output.numel(), dtype=torch.float64, device=output.device)
    return count.remainder(7).sub(3).div(2).reshape(output.shape).to(output.dtype)


def moved(x: Tensor, eps: float, direction: str) -> Tensor:
    """`x` in float64, its elements moved by `eps` of their size.

    "up" moves all of them the same way, which is what the terms of a sum can do at worst;
    "apart" moves neighbours against each other, which is what a difference feels.
    """
    wide = x.detach().double()
    if direction == "up":
        wide = wide + eps * wide.abs()
    elif direction == "apart":
        signs = torch.arange(x.numel(), device=x.device).remainder(3).sub(1).reshape(x.shape)
        wide = wide * (1 + eps * signs)
    return wide.requires_grad_(x.requires_grad)


def dense(x: Tensor) -> Tensor:
    x = x.detach()
    if x.is_quantized:
        x = x.dequantize()
    if x.layout is not torch.strided:
        x = x.to_dense()
    return x.resolve_conj().resolve_neg()


def widen(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def largest_finite(x: Tensor) -> float:
    largest = float(x.max()) if x.numel() else 0.0
    if math.isfinite(largest):  # nearly always: a mask of a whole model takes seconds
        return largest
    x = x[torch.isfinite(x)]
    return float(x.max()) if x.numel() else 0.0


def expected_largest(errors: Tensor) -> float:
    """Bound on the largest of this number of errors of this mean square."""
    mean_square = float(errors.square().mean()) if errors.numel() else 0.0
    if not math.isfinite(mean_square):
        errors = errors[torch.isfinite(errors)]
        mean_square = float(errors.square().mean()) if errors.numel() else 0.0
    return math.sqrt(mean_square) * math.sqrt(2 * math.log(2 * max(1, errors.numel())))
