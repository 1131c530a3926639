"""Scalar expressions: equal formulas are one object, and what rewrites them keeps their meaning."""

from __future__ import annotations

import gc
import math

import pytest

from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr

F32, I64, BOOL, BF16 = DType.F32, DType.I64, DType.BOOL, DType.BF16
X, Y = ix.var("x", 8), ix.var("y", 5)
ATOM_X = ix.as_atom(X)
assert ATOM_X is not None


def load(name: str = "i0", index: ix.Dim = X, dtype: DType = F32) -> Expr:
    return ex.load(name, index, dtype)


def formula() -> Expr:
    """exp(i0[x] * 2 + 1), with the parts made again."""
    scaled = ex.apply("mul", load(), ex.const(2, F32))
    return ex.apply("exp", ex.apply("add", scaled, ex.const(1, F32)))


def inside() -> Expr:
    return ex.apply("lt", ex.index_value(X), ex.const(4, I64))


def test_equal_formulas_are_one_object() -> None:
    assert formula() is formula()


DIFFERENT = [
    (ex.const(0.0, F32), ex.const(-0.0, F32)),
    (ex.const(1, F32), ex.const(1, DType.F64)),
    (ex.const(1, I64), ex.const(True, BOOL)),
    (load(index=X), load(index=ix.var("y", 8))),
    (load(), load("i1")),
    (ex.round_to(load(), BF16), ex.round_to(load(), DType.F16)),
    (ex.apply("sub", load(), load("i1")), ex.apply("sub", load("i1"), load())),
]


@pytest.mark.parametrize("pair", DIFFERENT, ids=str)
def test_different_formulas_are_not(pair: tuple[Expr, Expr]) -> None:
    assert pair[0] is not pair[1] and pair[0].digest() != pair[1].digest()


def test_loops_of_other_sizes_have_other_variables() -> None:
    assert load(index=X) is not load(index=ix.var("x", 9))


def test_nan_is_one_constant() -> None:
    assert ex.const(math.nan, F32) is ex.const(float("nan"), F32)


def test_forgotten_when_nobody_holds_it() -> None:
    value = ex.load("only_here", X, F32)
    assert any(key[3] == ("only_here", X) for key in list(ex._INTERNED))
    del value
    gc.collect()
    assert not any(key[3] == ("only_here", X) for key in list(ex._INTERNED))


TEXTS = [
    (formula(), "exp(add(mul(i0[x], 2.0), 1.0))"),
    (ex.const(3, I64), "3:i64"),
    (ex.cast(load(), I64), "i64(i0[x])"),
    (ex.round_to(load(), BF16), "round_to_bf16(i0[x])"),
    (ex.index_value(ix.add(ix.mul(X, 5), Y)), "index(5*x + y)"),
    (ex.masked_load("i0", X, F32, inside(), ex.const(0, F32)),
     "i0[x if lt(index(x), 4:i64), 0.0]"),
    (load(index=ix.indirect(load("i1", Y, I64), 8)), "i0[[i1[y]]]"),
]  # fmt: skip


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: row[1])
def test_prints(row: tuple[Expr, str]) -> None:
    assert row[0].text() == row[1]


FOLDED = [
    (ex.cast(load(), F32), load()),
    (ex.round_to(load(), F32), load()),
    (ex.round_to(ex.round_to(load(), BF16), BF16), ex.round_to(load(), BF16)),
    (ex.cast(ex.const(0.1, DType.F64), F32), ex.const(0.10000000149011612, F32)),
    (ex.cast(ex.const(1e300, DType.F64), F32), ex.const(math.inf, F32)),
    (ex.apply("land", ex.const(True, BOOL), inside()), inside()),
    (ex.apply("lor", inside(), ex.const(True, BOOL)), ex.const(True, BOOL)),
    (ex.apply("lt", ex.const(1, I64), ex.const(2, I64)), ex.const(True, BOOL)),
    (ex.apply("where", ex.const(False, BOOL), load(), load("i1")), load("i1")),
    (ex.masked_load("i0", X, F32, ex.const(True, BOOL), ex.const(0, F32)), load()),
    (ex.masked_load("i0", X, F32, ex.const(False, BOOL), ex.const(7, F32)), ex.const(7, F32)),
]


@pytest.mark.parametrize("pair", FOLDED, ids=lambda pair: pair[1].text())
def test_folds(pair: tuple[Expr, Expr]) -> None:
    assert pair[0] is pair[1]


def test_cast_of_what_no_integer_holds_stays() -> None:
    assert ex.cast(ex.const(math.inf, F32), I64).op == "cast"


SUBSTITUTED = [
    (formula(), 3, "exp(add(mul(i0[3], 2.0), 1.0))"),
    (ex.index_value(ix.mul(X, 2)), 3, "6:i64"),
    (ex.apply("where", inside(), load(), ex.const(0, F32)), 3, "i0[3]"),
    (ex.apply("where", inside(), load(), ex.const(0, F32)), 5, "0.0"),
    (ex.masked_load("i0", X, F32, inside(), ex.const(9, F32)), 3, "i0[3]"),
    (ex.masked_load("i0", X, F32, inside(), ex.const(9, F32)), 5, "9.0"),
    (load(index=ix.indirect(load("i1", X, I64), 8)), 2, "i0[[i1[2]]]"),
    (formula(), ix.add(ix.mul(ix.var("r", 2), 4), ix.var("c", 4)),
     "exp(add(mul(i0[c + 4*r], 2.0), 1.0))"),
]  # fmt: skip


@pytest.mark.parametrize("row", SUBSTITUTED, ids=lambda row: row[2])
def test_substitutes(row: tuple[Expr, ix.Dim, str]) -> None:
    value, position, expected = row
    assert ATOM_X is not None
    assert ex.substitute(value, {ATOM_X: position}).text() == expected


def test_substitution_leaves_other_formulas_alone() -> None:
    other = ex.load("i0", Y, F32)
    assert ATOM_X is not None
    assert ex.substitute(ex.apply("exp", other), {ATOM_X: 1}) is ex.apply("exp", other)


def test_guards_every_load_and_keeps_older_guards() -> None:
    older = ex.apply("gt", ex.index_value(X), ex.const(1, I64))
    both = ex.apply("add", load(), ex.masked_load("i1", X, F32, older, ex.const(5, F32)))
    plain, masked = ex.loads_of(ex.guard_loads(both, inside()))
    assert plain is ex.masked_load("i0", X, F32, inside(), ex.const(0, F32))
    assert masked.args == (ex.apply("land", older, inside()), ex.const(5, F32))


def test_guards_loads_inside_indices() -> None:
    value = load(index=ix.indirect(load("i1", Y, I64), 8))
    guarded = ex.loads_of(ex.guard_loads(value, inside()))
    assert [e.buffer for e in guarded] == ["i1", "i0"] and all(e.args for e in guarded)


def test_variables_are_found_inside_indices() -> None:
    value = load(index=ix.indirect(load("i1", Y, I64), 8))
    assert value.variables() == {ix.as_atom(Y)}
    assert formula().variables() == {ATOM_X}


def test_walk_gives_arguments_before_users_once() -> None:
    shared = formula()
    order = ex.walk(ex.apply("mul", shared, shared), set())
    assert len(order) == len(set(order)) == 7
    for place, e in enumerate(order):
        assert all(order.index(a) < place for a in e.args)


def test_shared_parts_do_not_blow_up() -> None:
    value = load()
    for _ in range(200):
        value = ex.apply("add", value, value)
    assert value.cost <= 1 << 20 and len(value.short_text()) < 40


def test_digest_is_the_same_in_every_process() -> None:
    assert formula().digest() == "fce2069f7944583d"
