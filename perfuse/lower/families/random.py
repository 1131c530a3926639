"""Random numbers: each a function of a seed drawn once per call and the element's position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from perfuse.graph import random_ops
from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import contiguous_strides
from perfuse.lower.builder import Builder
from perfuse.lower.families.creation import requested_dtype
from perfuse.lower.families.pointwise import element
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, positions, reindex

assert random_ops  # importing it defines the ops of our own that are lowered here

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
    flat: Dim = 0
    for step, stride in zip(positions(shape), contiguous_strides(tuple(shape)), strict=True):
        flat = step * stride + flat
    return ex.index_value(flat)


def _float_dtype(dtype: Any, like: Tensor | None = None) -> DType:
    chosen = like.dtype if like is not None and dtype is None else requested_dtype(
        dtype, torch.get_default_dtype()
    )  # fmt: skip
    if not chosen.is_float or chosen.num_bytes == 1:
        raise CannotLower(f"random numbers of {chosen}")
    return chosen


def _uniform(builder: Builder, shape: Sequence[Dim], dtype: DType, generator: Any = None) -> Expr:
    """Uniform in [0, 1), in the compute type."""
    seed, position = _begin(builder, shape, generator)
    return _uniform_of(seed, position, dtype)


def _uniform_of(seed: Expr, position: Expr, dtype: DType) -> Expr:
    value = ex.apply("rand_f32", seed, position, dtype=DType.F32)
    if dtype in _NUM_BITS:
        scale = float(1 << _NUM_BITS[dtype])
        steps = ex.apply("floor", ex.apply("mul", value, ex.const(scale, DType.F32)))
        value = ex.apply("mul", steps, ex.const(1 / scale, DType.F32))
    return ex.cast(value, dtype)


def _normal(builder: Builder, shape: Sequence[Dim], dtype: DType, generator: Any = None) -> Expr:
    return _normal_of(*_begin(builder, shape, generator), dtype)


def _normal_of(seed: Expr, position: Expr, dtype: DType) -> Expr:
    return ex.cast(ex.apply("randn_f32", seed, position, dtype=DType.F32), dtype)


def _made(shape: Sequence[Dim], dtype: DType, value: Expr) -> Tensor:
    return Tensor(tuple(shape), dtype, ex.round_to(ex.cast(value, dtype), dtype))


@lowers("perfuse.seeds.default")
def seeds(builder: Builder, count: int, *, device: Any) -> Tensor:
    start = builder.first_of_seeds(count)
    (at,) = positions((count,))
    return Tensor((count,), DType.I64, ex.load("seeds", at + start, DType.I64))


def _at(
    seeds: Tensor,
    index: int,
    size: Sequence[Dim],
    dtype: Any,
    number_of: Callable[[Expr, Expr, DType], Expr],
) -> Tensor:
    """Numbers that follow from one of the seeds and where they stand."""
    chosen = _float_dtype(dtype)
    seed = reindex(seeds, (), (index,)).value
    return _made(size, chosen, number_of(seed, _flat_position(size), chosen))


@lowers("perfuse.uniform_at.default")
def uniform_at(
    builder: Builder, seeds: Tensor, index: int, size: Sequence[Dim], dtype: Any
) -> Tensor:
    return _at(seeds, index, size, dtype, _uniform_of)


@lowers("perfuse.normal_at.default")
def normal_at(
    builder: Builder, seeds: Tensor, index: int, size: Sequence[Dim], dtype: Any
) -> Tensor:
    return _at(seeds, index, size, dtype, _normal_of)


@lowers("aten.rand.default")
def rand(builder: Builder, size: Sequence[Dim], dtype: Any = None, **kw: Any) -> Tensor:
    chosen = _float_dtype(dtype)
    return _made(size, chosen, _uniform(builder, size, chosen))


@lowers("aten.rand_like.default")
def rand_like(builder: Builder, x: Tensor, dtype: Any = None, **kw: Any) -> Tensor:
    chosen = _float_dtype(dtype, x)
    return _made(x.shape, chosen, _uniform(builder, x.shape, chosen))


@lowers("aten.randn.default")
def randn(builder: Builder, size: Sequence[Dim], dtype: Any = None, **kw: Any) -> Tensor:
    chosen = _float_dtype(dtype)
    return _made(size, chosen, _normal(builder, size, chosen))


@lowers("aten.randn_like.default")
def randn_like(builder: Builder, x: Tensor, dtype: Any = None, **kw: Any) -> Tensor:
    chosen = _float_dtype(dtype, x)
    return _made(x.shape, chosen, _normal(builder, x.shape, chosen))


def _below(builder: Builder, x: Tensor, chance: Expr, generator: Any) -> Tensor:
    drawn = _uniform(builder, x.shape, DType.F32, generator)
    hit = ex.apply("lt", drawn, ex.cast(chance, DType.F32))
    return Tensor(x.shape, x.dtype, ex.cast(hit, x.dtype))


@lowers("aten.bernoulli.default")
def bernoulli(builder: Builder, x: Tensor, generator: Any = None) -> Tensor:
    return _below(builder, x, x.value, generator)


@lowers("aten.bernoulli.p")
def bernoulli_p(builder: Builder, x: Tensor, p: float = 0.5, generator: Any = None) -> Tensor:
    return _below(builder, x, element(p, DType.F32), generator)


@lowers("aten.uniform.default")
def uniform(
    builder: Builder, x: Tensor, low: float = 0.0, high: float = 1.0, generator: Any = None
) -> Tensor:
    chosen = _float_dtype(None, x)
    drawn = _uniform(builder, x.shape, chosen, generator)
    width = element(high - low, chosen.compute)
    value = ex.apply("add", ex.apply("mul", drawn, width), element(low, chosen.compute))
    return _made(x.shape, chosen, value)


@lowers("aten.normal_functional.default")
def normal(
    builder: Builder, x: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None
) -> Tensor:
    chosen = _float_dtype(None, x)
    drawn = _normal(builder, x.shape, chosen, generator)
    scaled = ex.apply("mul", drawn, element(std, chosen.compute))
    return _made(x.shape, chosen, ex.apply("add", scaled, element(mean, chosen.compute)))


@lowers("aten.exponential.default")
def exponential(builder: Builder, x: Tensor, rate: float = 1.0, generator: Any = None) -> Tensor:
    chosen = _float_dtype(None, x)
    drawn = _uniform(builder, x.shape, DType.F32, generator)
    # The middle of a step of the generator: neither 0 nor infinity can come out.
    centred = ex.apply("add", drawn, ex.const(2.0**-25, DType.F32))
    value = ex.apply("neg", ex.apply("log", centred))
    return _made(x.shape, chosen, ex.apply("div", value, element(rate, DType.F32)))


def _integers(builder: Builder, shape: Sequence[Dim], low: Any, high: Any, dtype: DType) -> Tensor:
    bounds = [element(v, DType.I64) for v in (low, high)]
    drawn = ex.apply("randint64", *_begin(builder, shape, None), *bounds, dtype=DType.I64)
    return _made(shape, dtype, drawn)


@lowers("aten.randint.default")
def randint(
    builder: Builder, high: Any, size: Sequence[Dim], dtype: Any = torch.int64, **kw: Any
) -> Tensor:
    return _integers(builder, size, 0, high, requested_dtype(dtype, torch.int64))


@lowers("aten.randint.low")
def randint_low(
    builder: Builder, low: Any, high: Any, size: Sequence[Dim], dtype: Any = torch.int64, **kw: Any
) -> Tensor:
    return _integers(builder, size, low, high, requested_dtype(dtype, torch.int64))


@lowers("aten.randint_like.default")
def randint_like(builder: Builder, x: Tensor, high: Any, dtype: Any = None, **kw: Any) -> Tensor:
    chosen = x.dtype if dtype is None else requested_dtype(dtype, torch.int64)
    return _integers(builder, x.shape, 0, high, chosen)


@lowers("aten.randint_like.low_dtype")
def randint_like_low(
    builder: Builder, x: Tensor, low: Any, high: Any, dtype: Any = None, **kw: Any
) -> Tensor:
    chosen = x.dtype if dtype is None else requested_dtype(dtype, torch.int64)
    return _integers(builder, x.shape, low, high, chosen)
