"""Ops over lists of tensors (`_foreach_*`), as the plain op on each tensor of the list.

What runs as one kernel is decided later, by `schedule/batch.py`, for these and all other loops.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_Rule = Callable[..., Any]

_UNARY = """
abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 max neg
reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc
""".split()
_BINARY = "add sub mul div pow clamp_min clamp_max lerp".split()


def each(op: _Rule) -> _Rule:
    """The op on each tensor: lists are zipped, other arguments go to all."""

    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        count = next(len(a) for a in args if isinstance(a, list | tuple))
        rows = zip(*(a if isinstance(a, list | tuple) else [a] * count for a in args), strict=True)
        return [op(*row, **kwargs) for row in rows]

    return run


def _scaled(op: _Rule, inner: _Rule) -> _Rule:
    """`op`, which is x plus a value times `inner` of a and b; the value may be a tensor."""

    def run(x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Any:
        if isinstance(value, Tensor):
            return x + value.to(x.dtype) * inner(a, b)
        return op(x, a, b, value=value)

    return run


def _numbers_of_tensor(op: _Rule) -> _Rule:
    """The overload that takes one number for each tensor out of a 1-d tensor."""

    def run(x: list[Tensor], a: list[Tensor], b: list[Tensor], scalars: Tensor) -> list[Tensor]:
        return each(op)(x, a, b, list(torch.unbind(scalars)))  # type: ignore[no-any-return]

    return run


def _norm(x: list[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(item, ord, dtype=dtype) for item in x]


def _power_sum(x: list[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.sum(torch.abs(item).pow(ord), dtype=dtype or item.dtype) for item in x]


def _copy(x: list[Tensor], source: list[Tensor], non_blocking: bool = False) -> list[Tensor]:
    return [torch.ops.aten.copy.default(a, b) for a, b in zip(x, source, strict=True)]


def _unscale(x: list[Tensor], found: Tensor, inverse: Tensor) -> tuple[list[Tensor], Tensor]:
    """GradScaler's: times a number, and whether any element is infinite or NaN."""
    bad = [torch.logical_not(torch.isfinite(item)).any() for item in x]
    seen = torch.stack(bad).any() if bad else torch.zeros_like(found, dtype=torch.bool)
    out = [(item * inverse).to(item.dtype) for item in x]
    return out, torch.where(seen, torch.ones_like(found), found)


def _rows() -> dict[str, _Rule]:
    rows = {f"aten._foreach_{name}.default": each(getattr(torch, name)) for name in _UNARY}
    for name, overload in itertools.product(_BINARY, ("List", "Scalar", "ScalarList")):
        rows[f"aten._foreach_{name}.{overload}"] = each(getattr(torch, name))
    for name in ("add", "mul", "div"):
        rows[f"aten._foreach_{name}.Tensor"] = each(getattr(torch, name))
    for name, bound in (("maximum", torch.clamp_min), ("minimum", torch.clamp_max)):
        rows[f"aten._foreach_{name}.List"] = each(getattr(torch, name))
        rows[f"aten._foreach_{name}.Scalar"] = each(bound)
        rows[f"aten._foreach_{name}.ScalarList"] = each(bound)
    for name, inner in (("addcdiv", torch.div), ("addcmul", torch.mul)):
        op = _scaled(getattr(torch, name), inner)
        rows[f"aten._foreach_{name}.Scalar"] = each(op)
        rows[f"aten._foreach_{name}.ScalarList"] = each(op)
        rows[f"aten._foreach_{name}.Tensor"] = _numbers_of_tensor(op)
    return rows


FOREACH: dict[str, _Rule] = {
    **_rows(),
    "aten._foreach_pow.ScalarAndTensor": each(torch.pow),
    "aten._foreach_norm.Scalar": _norm,
    "aten._foreach_powsum.Scalar": _power_sum,
    "aten._foreach_clone.default": each(torch.clone),
    "aten._foreach_zero.default": each(torch.zeros_like),
    "aten._foreach_copy.default": _copy,
    "aten._amp_foreach_non_finite_check_and_unscale.default": _unscale,
}
