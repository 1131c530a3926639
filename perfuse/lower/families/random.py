"""Random numbers: each a function of a seed drawn once per call and the element's position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from perfuse.graph import random_ops
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.lower.builder import Builder
from perfuse.lower.families.creation import requested_dtype
from perfuse.lower.families.pointwise import element
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, positions, reindex

assert random_ops  # importing it defines the custom ops that are lowered here

# Bits of a significand: a uniform number keeps to them, so that rounding never reaches 1.
_NUM_BITS = {DType.BF16: 8, DType.F16: 11}


def _begin(builder: Builder, shape: Sequence[Dim], generator: Any) -> tuple[Expr, Expr]:
    """(a new seed, flat position of the element): the arguments of every random scalar op."""
    if builder.settings.fallback_random:
        raise CannotLower("random numbers drawn by eager (fallback_random)")
    if generator is not None:
        raise CannotLower("random numbers of a given generator")
    return builder.seed(), _flat_position(shape)


def _flat_position(shape: Sequence[Dim]) -> Expr:
    return ex.index_value(ix.flat(shape, positions(shape)))


def _float_dtype(dtype: Any, like: Tensor | None = None) -> DType:
    chosen = requested_dtype(dtype, torch.get_default_dtype() if like is None else like.dtype)
    if not chosen.is_float or chosen.num_bytes == 1:
        raise CannotLower(f"random numbers of {chosen}")
    return chosen


Draw = Callable[[Expr, Expr, DType], Expr]  # of a seed and a position, in the compute type


def _uniform(seed: Expr, position: Expr, dtype: DType) -> Expr:
    """Uniform in [0, 1)."""
    value = ex.apply("rand_f32", seed, position, dtype=DType.F32)
    if dtype in _NUM_BITS:
        scale = float(1 << _NUM_BITS[dtype])
        steps = ex.apply("floor", ex.apply("mul", value, ex.const(scale, DType.F32)))
        value = ex.apply("mul", steps, ex.const(1 / scale, DType.F32))
    return ex.cast(value, dtype)


def _normal(seed: Expr, position: Expr, dtype: DType) -> Expr:
    return ex.cast(ex.apply("randn_f32", seed, position, dtype=DType.F32), dtype)


def _made(shape: Sequence[Dim], dtype: DType, value: Expr) -> Tensor:
    return Tensor(tuple(shape), dtype, ex.round_to(ex.cast(value, dtype), dtype))


@lowers("perfuse.seeds.default")
def seeds(builder: Builder, count: int, *, device: Any) -> Tensor:
    start = builder.first_of_seeds(count)
    (at,) = positions((count,))
    return Tensor((count,), DType.I64, ex.load("seeds", at + start, DType.I64))


def _at(draw: Draw) -> Callable[..., Tensor]:
    """Numbers that follow from one of the seeds and from their position."""

    def lower(
        builder: Builder, seeds: Tensor, index: int, size: Sequence[Dim], dtype: Any
    ) -> Tensor:
        chosen = _float_dtype(dtype)
        seed = reindex(seeds, (), (index,)).value
        return _made(size, chosen, draw(seed, _flat_position(size), chosen))

    return lower


def _drawn(draw: Draw) -> Callable[..., Tensor]:
    """Numbers of a new seed, in a given size or in that of a tensor."""

    def lower(builder: Builder, like: Any, dtype: Any = None, **kw: Any) -> Tensor:
        is_like = isinstance(like, Tensor)
        chosen = _float_dtype(dtype, like if is_like else None)
        shape = like.shape if is_like else like
        return _made(shape, chosen, draw(*_begin(builder, shape, None), chosen))

    return lower


lowers("perfuse.uniform_at.default")(_at(_uniform))
lowers("perfuse.normal_at.default")(_at(_normal))
lowers("aten.rand.default", "aten.rand_like.default")(_drawn(_uniform))
lowers("aten.randn.default", "aten.randn_like.default")(_drawn(_normal))


def _below(builder: Builder, x: Tensor, chance: Expr, generator: Any) -> Tensor:
    drawn = _uniform(*_begin(builder, x.shape, generator), DType.F32)
    hit = ex.apply("lt", drawn, ex.cast(chance, DType.F32))
    return Tensor(x.shape, x.dtype, ex.cast(hit, x.dtype))


@lowers("aten.bernoulli.default")
def bernoulli(builder: Builder, x: Tensor, generator: Any = None) -> Tensor:
    return _below(builder, x, x.value, generator)


@lowers("aten.bernoulli.p")
def bernoulli_p(builder: Builder, x: Tensor, p: float = 0.5, generator: Any = None) -> Tensor:
    return _below(builder, x, element(p, DType.F32), generator)


def _scaled(
    builder: Builder, x: Tensor, draw: Draw, scale: float, shift: float, generator: Any
) -> Tensor:
    chosen = _float_dtype(None, x)
    drawn = draw(*_begin(builder, x.shape, generator), chosen)
    scaled = ex.apply("mul", drawn, element(scale, chosen.compute))
    return _made(x.shape, chosen, ex.apply("add", scaled, element(shift, chosen.compute)))


@lowers("aten.uniform.default")
def uniform(
    builder: Builder, x: Tensor, low: float = 0.0, high: float = 1.0, generator: Any = None
) -> Tensor:
    return _scaled(builder, x, _uniform, high - low, low, generator)


@lowers("aten.normal_functional.default")
def normal(
    builder: Builder, x: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None
) -> Tensor:
    return _scaled(builder, x, _normal, std, mean, generator)


@lowers("aten.exponential.default")
def exponential(builder: Builder, x: Tensor, rate: float = 1.0, generator: Any = None) -> Tensor:
    chosen = _float_dtype(None, x)
    drawn = _uniform(*_begin(builder, x.shape, generator), DType.F32)
    # The middle of a step of the generator: neither 0 nor infinity can come out.
    centred = ex.apply("add", drawn, ex.const(2.0**-25, DType.F32))
    value = ex.apply("neg", ex.apply("log", centred))
    return _made(x.shape, chosen, ex.apply("div", value, element(rate, DType.F32)))


def _integers(
    builder: Builder, shape: Sequence[Dim], limits: Sequence[Any], dtype: DType
) -> Tensor:
    """Numbers from 0, or from the first of two limits, up to the last."""
    bounds = [element(v, DType.I64) for v in (0, *limits)[-2:]]
    drawn = ex.apply("randint64", *_begin(builder, shape, None), *bounds, dtype=DType.I64)
    return _made(shape, dtype, drawn)


@lowers("aten.randint.default", "aten.randint.low")
def randint(builder: Builder, *args: Any, dtype: Any = torch.int64, **kw: Any) -> Tensor:
    *limits, size = args
    return _integers(builder, size, limits, requested_dtype(dtype, torch.int64))


@lowers("aten.randint_like.default", "aten.randint_like.low_dtype")
def randint_like(builder: Builder, x: Tensor, *limits: Any, dtype: Any = None, **kw: Any) -> Tensor:
    return _integers(builder, x.shape, limits, requested_dtype(dtype, x.dtype))
