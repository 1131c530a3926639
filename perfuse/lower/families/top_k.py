"""The k largest or smallest elements of each row, one after the other, on a CPU.

An element and its position are combined into one integer, its rank, which orders elements as eager
does, and equal ones by position. So no two ranks of a row are equal, and the next element is
the one with the largest rank below the last: a reduction, in the kernel that computes the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import LoopKind
from perfuse.lower.builder import Builder
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, expand, positions

# Each element is a few more sweeps over the row, and text to compile: 16 take g++ 12 a second.
_MOST_CHOSEN = 16
# Longest rows, with ranks of 32 and of 64 bits, where that beats ATen's partial sort, for 1 to 16
# elements (benchmarks/results/2026-11-19-cpu-gating). AVX2 has no maximum of 64-bit integers.
_WIDEST = {"avx512": (4096, 1024), "avx2": (1024, 160)}
_WIDEST_ELSEWHERE = (256, 64)

# Bits at the end of a float32 that are zero in these.
_FREE_BITS = {DType.BF16: 16, DType.F16: 13}
_NARROW_INTS = (DType.I8, DType.U8, DType.I16)
_DTYPES = (*_FREE_BITS, *_NARROW_INTS, DType.F32, DType.I32)
_LARGEST_I32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Ranks:
    """How elements of a dtype are combined with their positions, and taken out again.

    The upper bits are an integer that is ordered like the element: its own bits, except that
    negative floats are in the opposite order. The lower bits count from the end of the row.
    """

    dtype: DType  # of the elements
    is_largest: bool

    @property
    def kind(self) -> DType:
        is_narrow = self.dtype in _FREE_BITS or self.dtype in _NARROW_INTS
        return DType.I32 if is_narrow else DType.I64

    @property
    def place_bits(self) -> int:
        return _FREE_BITS.get(self.dtype, 16) if self.kind is DType.I32 else 32

    def of(self, value: Expr, place: Expr) -> Expr:
        key = self._key(value)
        key = key if self.is_largest else ex.apply("bit_not", key)
        if self.dtype in _FREE_BITS:
            upper = ex.apply("bit_and", key, self.number(~self._last_place))
        else:
            upper = ex.apply("shl", ex.cast(key, self.kind), self.number(self.place_bits))
        return ex.apply("bit_or", upper, self._from_end(ex.cast(place, self.kind)))

    def place(self, rank: Expr) -> Expr:
        lower = ex.apply("bit_and", rank, self.number(self._last_place))
        return ex.cast(self._from_end(lower), DType.I64)

    def value(self, rank: Expr) -> Expr:
        key = rank if self.is_largest else ex.apply("bit_not", rank)
        if self.dtype in _FREE_BITS:
            key = ex.apply("bit_and", key, self.number(~self._last_place))
        else:
            key = ex.apply("shr", key, self.number(self.place_bits))
        if not self.dtype.is_float:
            return ex.cast(key, self.dtype)
        bits = _swapped(ex.cast(key, DType.I32))
        if self.dtype in _FREE_BITS:
            bits = ex.apply("bit_and", bits, self.number(~self._last_place))
        return ex.apply("from_bits", bits, dtype=DType.F32)

    def number(self, value: int) -> Expr:
        return ex.const(value, self.kind)

    @property
    def _last_place(self) -> int:
        return (1 << self.place_bits) - 1

    def _from_end(self, place: Expr) -> Expr:
        return ex.apply("sub", self.number(self._last_place), place)

    def _key(self, value: Expr) -> Expr:
        """An integer of 32 bits that is ordered like the value; NaN is the largest."""
        if not self.dtype.is_float:
            return ex.cast(value, self.kind)
        key = _swapped(ex.apply("to_bits", value, dtype=DType.I32))
        return ex.apply("where", ex.apply("isnan", value), ex.const(_LARGEST_I32, DType.I32), key)


def _swapped(bits: Expr) -> Expr:
    """The bits of a float with all but the sign inverted if it is negative: its own inverse."""
    is_negative = ex.apply("lt", bits, ex.const(0, DType.I32))
    inverted = ex.apply("bit_xor", bits, ex.const(_LARGEST_I32, DType.I32))
    return ex.apply("where", is_negative, inverted, bits)


@lowers("aten.topk.default")
def top_k(
    builder: Builder, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    ranks = Ranks(x.dtype, largest)
    _check(builder, x, ranks, k, dim)
    dim %= x.ndim
    place = ex.index_value(positions(x.shape)[dim])
    value = ex.round_to(x.value, x.dtype)  # the rank of a small float has no room for more bits
    own = builder.realize(Tensor(x.shape, ranks.kind, ranks.of(value, place)))
    best = [builder.reduce(LoopKind.MAX, own, [dim], ranks.kind, keepdim=True)]
    while len(best) < k:
        best.append(_next(builder, own, dim, best[-1], ranks))
    shape = (*x.shape[:dim], k, *x.shape[dim + 1 :])
    chosen = builder.realize(_along(best, shape, dim)).value
    values = Tensor(shape, x.dtype, ranks.value(chosen))
    return values, Tensor(shape, DType.I64, ranks.place(chosen))


def _check(builder: Builder, x: Tensor, ranks: Ranks, k: int, dim: int) -> None:
    size = x.shape[dim] if x.ndim else None
    if builder.is_gpu:
        raise CannotLower("top-k on a GPU")
    if not isinstance(size, int) or not isinstance(k, int):
        raise CannotLower("top-k of a number, or of a dynamic size")
    if x.dtype not in _DTYPES:
        raise CannotLower(f"top-k of {x.dtype}")
    if not 0 < k <= min(size, _MOST_CHOSEN):
        raise CannotLower("top-k of many elements")
    if size > _WIDEST.get(builder.isa, _WIDEST_ELSEWHERE)[ranks.kind is DType.I64]:
        raise CannotLower("top-k of a long row")


def _next(builder: Builder, own: Tensor, dim: int, last: Tensor, ranks: Ranks) -> Tensor:
    """The largest rank of each row below the last one.

    With the last one and half the range subtracted, all others wrap around, and the ranks below it
    are the largest, in the same order.
    """
    half = ranks.number(-(1 << (8 * ranks.kind.num_bytes - 1)))
    shift = Tensor(last.shape, ranks.kind, ex.apply("bit_xor", last.value, half))
    shifted = ex.apply("sub", own.value, expand(shift, own.shape).value)
    below = Tensor(own.shape, ranks.kind, shifted)
    found = builder.reduce(LoopKind.MAX, below, [dim], ranks.kind, keepdim=True)
    rank = ex.apply("add", found.value, shift.value)
    return builder.realize(Tensor(last.shape, ranks.kind, rank))


def _along(best: Sequence[Tensor], shape: Sequence[Dim], dim: int) -> Tensor:
    """One rank of each row after the other, along a dimension."""
    place = ex.index_value(positions(shape)[dim])
    value = expand(best[-1], shape).value
    for number, rank in reversed(list(enumerate(best[:-1]))):
        is_here = ex.apply("eq", place, ex.const(number, DType.I64))
        value = ex.apply("where", is_here, expand(rank, shape).value, value)
    return Tensor(tuple(shape), best[0].dtype, value)
