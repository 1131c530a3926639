"""The k largest or smallest elements of each row, one after the other, on a CPU.

An element and its position are combined into one integer, its rank, which orders elements as eager
does, and equal ones by position. So no two ranks of a row are equal, and the next element is
the one with the largest rank below the last: a reduction, in the kernel that computes the row.

Eager's choice among equal elements is arbitrary. Only ATen's call repeats it, so that remains where
elements are often equal: this is for gates, which choose among results of softmax or sigmoid of
float32 logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Loop, LoopKind
from perfuse.lower.builder import Builder
from perfuse.lower.registry import CannotLower, lowers
from perfuse.lower.tensor import Tensor, expand, positions

# Each element is a few more sweeps over the row, and text to compile: 16 take g++ 12 a second.
_MOST_CHOSEN = 16
# Longest rows where that beats ATen's partial sort, for 1 to 16 elements
# (benchmarks/results/2026-11-19-cpu-gating). AVX2 has no maximum of 64-bit integers.
_WIDEST = {"avx512": 1024, "avx2": 160}
_WIDEST_ELSEWHERE = 64

_EXPONENTIALS = frozenset({"exp", "exp_mid", "sigmoid"})

_RANK = DType.I64
_PLACE_BITS = 32
_LAST_PLACE = (1 << _PLACE_BITS) - 1
_LARGEST_I32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Ranks:
    """How elements are combined with their positions, and taken out again.

    The upper bits are an integer that is ordered like the element: its own bits, except that
    negative floats are in the opposite order. The lower bits count from the end of the row.
    """

    is_largest: bool

    def of(self, value: Expr, place: Expr) -> Expr:
        key = _swapped(ex.apply("to_bits", value, dtype=DType.I32))
        largest = ex.const(_LARGEST_I32, DType.I32)  # NaN
        key = ex.apply("where", ex.apply("isnan", value), largest, key)
        key = key if self.is_largest else ex.apply("bit_not", key)
        upper = ex.apply("shl", ex.cast(key, _RANK), _number(_PLACE_BITS))
        return ex.apply("bit_or", upper, _from_end(ex.cast(place, _RANK)))

    def place(self, rank: Expr) -> Expr:
        return _from_end(ex.apply("bit_and", rank, _number(_LAST_PLACE)))

    def value(self, rank: Expr) -> Expr:
        key = rank if self.is_largest else ex.apply("bit_not", rank)
        key = ex.cast(ex.apply("shr", key, _number(_PLACE_BITS)), DType.I32)
        return ex.apply("from_bits", _swapped(key), dtype=DType.F32)


def _number(value: int) -> Expr:
    return ex.const(value, _RANK)


def _from_end(place: Expr) -> Expr:
    return ex.apply("sub", _number(_LAST_PLACE), place)


def _swapped(bits: Expr) -> Expr:
    """The bits of a float with all but the sign inverted if it is negative: its own inverse."""
    is_negative = ex.apply("lt", bits, ex.const(0, DType.I32))
    inverted = ex.apply("bit_xor", bits, ex.const(_LARGEST_I32, DType.I32))
    return ex.apply("where", is_negative, inverted, bits)


@lowers("aten.topk.default")
def top_k(
    builder: Builder, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    _check(builder, x, k, dim)
    dim %= x.ndim
    ranks = Ranks(largest)
    place = ex.index_value(positions(x.shape)[dim])
    own = builder.realize(Tensor(x.shape, _RANK, ranks.of(x.value, place)))
    best = [builder.reduce(LoopKind.MAX, own, [dim], _RANK, keepdim=True)]
    while len(best) < k:
        best.append(_next(builder, own, dim, best[-1]))
    shape = (*x.shape[:dim], k, *x.shape[dim + 1 :])
    chosen = builder.realize(_along(best, shape, dim)).value
    values = Tensor(shape, x.dtype, ranks.value(chosen))
    return values, Tensor(shape, DType.I64, ranks.place(chosen))


def _check(builder: Builder, x: Tensor, k: int, dim: int) -> None:
    size = x.shape[dim] if x.ndim else None
    if builder.is_gpu:
        raise CannotLower("top-k on a GPU")
    if not isinstance(size, int) or not isinstance(k, int):
        raise CannotLower("top-k of a number, or of a dynamic size")
    if x.dtype is not DType.F32 or not _are_scores(builder, x.value):
        raise CannotLower("top-k of elements that may be equal")
    if not 0 < k <= min(size, _MOST_CHOSEN):
        raise CannotLower("top-k of many elements")
    if size > _WIDEST.get(builder.isa, _WIDEST_ELSEWHERE):
        raise CannotLower("top-k of a long row")


def _are_scores(builder: Builder, value: Expr) -> bool:
    """Whether exponentials are on the way from the last library calls to a value, and no halves.

    Of halves and integers many are equal, and so are their exponentials: with logits in bfloat16,
    eager's choice among equals decides about an expert in one of thirty rows of 256.
    """
    loops = {node.out: node for node in builder.nodes if isinstance(node, Loop)}
    seen: set[Expr] = set()
    pending = [value]
    has_exponentials = False
    while pending:
        for e in ex.walk(pending.pop(), seen):
            if _has_few_values(builder, e):
                return False
            has_exponentials |= e.op in _EXPONENTIALS
            if e.op == "load" and e.buffer in loops:
                pending.append(loops.pop(e.buffer).value)
    return has_exponentials


def _has_few_values(builder: Builder, e: Expr) -> bool:
    """Whether a number was a half or an integer."""
    if e.op == "load":
        return builder.buffers[e.buffer].dtype.is_narrow_float
    is_converted = e.op == "cast" and e.args[0].dtype.is_int and e.dtype.is_float
    return is_converted or e.op == "round_to"


def _next(builder: Builder, own: Tensor, dim: int, last: Tensor) -> Tensor:
    """The largest rank of each row below the last one.

    With the last one and half the range subtracted, all others wrap around, and the ranks below it
    are the largest, in the same order.
    """
    half = _number(-(1 << 63))
    shift = Tensor(last.shape, _RANK, ex.apply("bit_xor", last.value, half))
    shifted = ex.apply("sub", own.value, expand(shift, own.shape).value)
    below = Tensor(own.shape, _RANK, shifted)
    found = builder.reduce(LoopKind.MAX, below, [dim], _RANK, keepdim=True)
    rank = ex.apply("add", found.value, shift.value)
    return builder.realize(Tensor(last.shape, _RANK, rank))


def _along(best: Sequence[Tensor], shape: Sequence[Dim], dim: int) -> Tensor:
    """One rank of each row after the other, along a dimension."""
    place = ex.index_value(positions(shape)[dim])
    value = expand(best[-1], shape).value
    for number, rank in reversed(list(enumerate(best[:-1]))):
        is_here = ex.apply("eq", place, ex.const(number, DType.I64))
        value = ex.apply("where", is_here, expand(rank, shape).value, value)
    return Tensor(tuple(shape), best[0].dtype, value)
