"""The emitter core, by a toy generator of Python: it adds spelling and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from perfuse.codegen.emitter import Emitter, Formula, KernelFrame, Names, Resolver, Scope, Value
from perfuse.codegen.writer import Writer
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Division, Quotient
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis, Buffer, Loop, LoopKind
from perfuse.schedule.plan import Kernel, Member

ROWS, COLUMNS = Axis("i", 3), Axis("j", 4)
ROW, COLUMN = ix.var("i", 3), ix.var("j", 4)
OPS = {"add": "({0} + {1})", "mul": "({0} * {1})", "neg": "(-{0})"}
TYPES = {DType.F32: "float", DType.I64: "int", DType.I32: "int"}


class PythonNames(Names):
    def quotient(self, atom: Division, numerator: str, divisor: str) -> str:
        return f"(({numerator}) {'//' if isinstance(atom, Quotient) else '%'} ({divisor}))"


class PythonEmitter(Emitter[PythonNames, Value]):
    def at(self, scope: Scope[Value], resolve: Resolver[Value]) -> PythonEmitter:
        return PythonEmitter(self.names, scope, resolve)

    def stays(self, e: Expr) -> bool:
        return False

    def constant(self, e: Expr) -> Value:
        return Value(repr(e.attr), e.dtype, 0)

    def computed(self, e: Expr, args: list[Value]) -> Value:
        if e.op == "cast":
            return Value(self.cast(args[0], e.dtype), e.dtype, 0)
        return Value(OPS[e.op].format(*(a.text for a in args)), e.dtype, 0)

    def position(self, e: Expr) -> Value:
        return Value(self.index(e.attr), e.dtype, 0)

    def read(self, e: Expr) -> Value:
        buffer, index = e.attr
        return self.named(Value(f"{self.names.argument(buffer)}[{self.index(index)}]", e.dtype, 0))

    def check(self, source: Value, value: Expr, size: Dim) -> Value:
        return self.named(Value(f"checked({source.text}, {self.index(size)})", source.dtype, 0))

    def cast(self, value: Value, dtype: DType) -> str:
        return f"{TYPES[dtype]}({value.text})"

    def assignment(self, name: str, text: str) -> str:
        return f"{name} = {text}"


@dataclass
class Loops:
    """Two loops being written, with a scope each."""

    resolve: Resolver[Value] = lambda e: None

    def __post_init__(self) -> None:
        self.names = PythonNames({})
        self.outer, self.inner = Writer(1), Writer(2)
        rows = Scope[Value](self.outer, frozenset({ROWS.atom}), None)
        self.scope = Scope[Value](self.inner, frozenset({COLUMNS.atom}), rows)
        self.emitter = PythonEmitter(self.names, self.scope, self.resolve)

    def run(self, value: Value, **buffers: list[Any]) -> list[Any]:
        """The values that the loops append, one for each row and column."""
        lines = [f"for i in range({ROWS.size}):", self.outer.text().rstrip("\n")]
        lines += [f"  for j in range({COLUMNS.size}):", self.inner.text().rstrip("\n")]
        lines += [f"    out.append({value.text})"]
        names = {self.names.arguments[name]: data for name, data in buffers.items()}
        found: dict[str, Any] = {"out": [], "checked": checked, **names}
        exec("\n".join(lines), found)
        return list(found["out"])


def checked(number: int, size: int) -> int:
    if not 0 <= number < size:
        raise IndexError(number)
    return number


def load(name: str, at: Dim, dtype: DType = DType.F32) -> Expr:
    return ex.load(name, at, dtype)


X, Y = [1.0, 2.0, 3.0], [10.0, 20.0, 30.0, 40.0]


def test_values_are_computed_once_and_where_they_belong() -> None:
    loops = Loops()
    x, y = load("x", ROW), load("y", COLUMN)
    row = ex.apply("mul", x, x)
    value = loops.emitter.value(ex.apply("add", ex.apply("mul", row, y), ex.apply("neg", row)))
    assert loops.run(value, x=X, y=Y) == [a * a * b - a * a for a in X for b in Y]
    assert loops.outer.text().count("* t") == 1 and loops.outer.text().count("a0[") == 1
    assert "a0" not in loops.inner.text()
    assert loops.emitter.value(row) is loops.scope.find(row)


def test_arguments_and_symbols_are_numbered_by_first_use() -> None:
    loops = Loops()
    n = ix.symbol("s7")
    loops.emitter.value(load("y", ix.add(COLUMN, n)))
    loops.emitter.value(load("x", ROW))
    assert loops.names.arguments == {"y": "a0", "x": "a1"}
    assert loops.names.symbols == {"s7": "n0"}


def test_divisions_inside_indices_are_spelled_by_the_names() -> None:
    loops = Loops()
    flat = ix.add(ix.mul(ROW, 4), COLUMN)
    value = loops.emitter.value(load("x", ix.floordiv(flat, 5)))
    assert loops.run(value, x=X) == [X[(4 * i + j) // 5] for i in range(3) for j in range(4)]


def test_an_index_from_data_is_checked_once() -> None:
    loops = Loops()
    where = load("at", ROW, DType.I64)
    index = ix.indirect(where, 4)
    both = ex.apply("add", load("y", index), load("z", index))
    value = loops.emitter.value(both)
    z = [1.0, 2.0, 3.0, 4.0]
    at = [3, 0, 1]
    assert loops.run(value, at=at, y=Y, z=z) == [Y[k] + z[k] for k in at for _ in range(4)]
    assert (loops.outer.text() + loops.inner.text()).count("checked(") == 1
    with pytest.raises(IndexError):
        loops.run(value, at=[0, 4, 0], y=Y, z=z)


def test_a_load_is_answered_by_a_value_or_a_formula() -> None:
    """m = 2 * x is made by the kernel itself; k is in a variable already."""
    doubled = ex.apply("add", load("x", ROW), load("x", ROW))

    def resolve(e: Expr) -> Value | Formula[Value] | None:
        if e.buffer == "k":
            return Value("100.0", DType.F32, 0)
        return Formula(doubled, resolve) if e.buffer == "m" else None

    loops = Loops(resolve)
    value = loops.emitter.value(ex.apply("add", load("m", ROW), load("k", ROW)))
    assert loops.run(value, x=X) == [2 * a + 100 for a in X for _ in Y]
    assert list(loops.names.arguments) == ["x"]


def test_a_formula_of_another_type_is_converted_as_memory_would() -> None:
    loops = Loops(
        lambda e: Formula(load("x", ROW), lambda inner: None) if e.buffer == "m" else None
    )
    value = loops.emitter.value(load("m", ROW, DType.I32))
    assert loops.run(value, x=[1.5, 2.5, -3.5]) == [n for n in (1, 2, -3) for _ in Y]
    assert value.dtype is DType.I32


def test_deep_expressions_do_not_nest() -> None:
    loops = Loops()
    value = load("x", ROW)
    for _ in range(5000):
        value = ex.apply("neg", value)
    assert loops.run(loops.emitter.value(value), x=X) == [a for a in X for _ in Y]


def test_a_frame_leaves_the_rounding_to_the_store() -> None:
    half = Buffer("h", DType.F16, (3,), (1,))
    rounded = ex.round_to(load("x", ROW), DType.F16)
    loop = Loop("h", (ROWS,), LoopKind.MAP, rounded, ROW)
    alone = Kernel("k0", (ROWS,), (Member(loop, "full", 0),), frozenset({"h"}))
    frame = KernelFrame(alone, {"h": half}, PythonNames({}))
    assert frame.formula_of(alone.members[0]) is rounded.args[0]
    reader = Loop("g", (ROWS,), LoopKind.MAP, load("h", ROW), ROW)
    both = Kernel("k1", (ROWS,), (*alone.members, Member(reader, "full", 1)), frozenset({"h"}))
    frame = KernelFrame(both, {"h": half}, PythonNames({}))
    assert frame.formula_of(both.members[0]) is rounded
    assert frame.formula_of(both.members[0], is_for_store=True) is rounded.args[0]
    assert [frame.short(m) for m in frame.of_role("full")] == ["m0", "m1"]
