"""Positions in 32 bits: the arithmetic that fits, and only that."""

from __future__ import annotations

import pytest

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.narrow import in_32_bits

Q, K = (ex.index_value(ix.var(name, 1000)) for name in "qk")
FAR = ex.index_value(ix.var("far", 2**31))
ANY = ex.index_value(ix.var("any", ix.symbol("s0")))
DATA = ex.load("b0", 0, DType.I64)


def of(value: int) -> Expr:
    return ex.const(value, DType.I64)


def has_wide(value: Expr) -> bool:
    """Whether it computes with 64-bit integers."""
    found = ex.walk(value, set())
    return any(e.op not in ("load", "index", "const") and e.dtype is DType.I64 for e in found)


DISTANCE = ex.apply("abs", ex.apply("sub", Q, K))


@pytest.mark.parametrize(
    "value",
    [
        ex.cast(DISTANCE, DType.F32),
        ex.apply("ge", Q, K),
        ex.apply("eq", ex.apply("mod", ex.apply("add", Q, K), of(3)), of(0)),
        ex.apply("lt", ex.apply("floordiv", DISTANCE, of(16)), ex.apply("min", Q, of(7))),
        ex.cast(ex.apply("mul", Q, ex.apply("mul", K, of(2000))), DType.F32),
        ex.apply("gt", ex.apply("sub", ANY, Q), of(5)),
        ex.cast(ex.apply("where", ex.apply("lt", Q, K), Q, ex.apply("neg", K)), DType.F64),
    ],
    ids=str,
)
def test_what_fits(value: Expr) -> None:
    made = in_32_bits(value)
    assert not has_wide(made) and made.dtype is value.dtype


@pytest.mark.parametrize(
    "value",
    [
        ex.cast(ex.apply("mul", Q, ex.apply("mul", K, of(3000))), DType.F32),
        ex.apply("gt", ex.apply("add", ANY, Q), of(5)),
        ex.apply("ge", ex.apply("add", Q, DATA), K),
        ex.apply("ge", Q, DATA),
        ex.apply("eq", ex.apply("add", FAR, Q), K),
        ex.apply("eq", ex.apply("mod", Q, DATA), of(0)),
        ex.load("b0", 0, DType.F32),
    ],
    ids=str,
)
def test_what_does_not(value: Expr) -> None:
    assert in_32_bits(value) is value
