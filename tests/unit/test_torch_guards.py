"""Guards on symbols as data: written down, read back, and set again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from perfuse.torch_compat.guards import CannotSpell, SymbolTable, graph_assumptions


def sized(*shape: int) -> tuple[SymbolTable, torch.Tensor]:
    """A fake tensor whose sizes are all symbols, and these symbols."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    source = ConstantSource("x")
    x = mode.from_tensor(torch.ones(shape), symbolic_context=context, source=source)
    return SymbolTable(env, tuple(size.node.expr for size in x.shape)), x


QUESTIONS: dict[str, Any] = {
    "equality": lambda a, b: a == b - 1,
    "order": lambda a, b: a + 3 < b * 2,
    "divisibility": lambda a, b: a % 3 == 0,
    "floor": lambda a, b: (a * b) // 4 >= 10,
    "quotient": lambda a, b: a / b < 0.9,
    "specialised": lambda a, b: int(a) == 6,
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_guards_are_read_back_as_they_were(name: str) -> None:
    table, x = sized(6, 7)
    mark = table.mark()
    assert table.guards_since(mark) == []
    assert bool(QUESTIONS[name](*x.shape))
    spelled = json.loads(json.dumps(table.guards_since(mark)))
    assert spelled

    again, other = sized(6, 7)
    before = again.mark()
    assert again.set_guards(spelled)
    assert again.guards_since(before) == spelled
    assert graph_assumptions([other]) == graph_assumptions([x])


def test_guards_that_do_not_hold_are_not_set() -> None:
    table, x = sized(6, 7)
    mark = table.mark()
    assert x.shape[0] % 3 == 0
    spelled = table.guards_since(mark)
    other, _ = sized(8, 7)
    before = other.mark()
    assert not other.set_guards(spelled)
    assert other.mark() == before


@pytest.mark.parametrize("damaged", [[["exit", 1]], [["symbol", 9]], [["float", 3]], [[]], ["Eq"]])
def test_what_is_no_guard_is_refused(damaged: list[Any]) -> None:
    table, _ = sized(6, 7)
    assert not table.set_guards(damaged)


def test_a_symbol_of_somebody_else_cannot_be_written_down() -> None:
    table, x = sized(6, 7)
    mark = table.mark()
    assert x.shape[1] % 7 == 0
    with pytest.raises(CannotSpell):
        SymbolTable(table.env, table.symbols[:1]).guards_since(mark)


def test_guards_are_among_the_assumptions_of_a_graph() -> None:
    _, x = sized(6, 7)
    assert graph_assumptions([x]) == []
    assert x.shape[0] % 3 == 0
    assert len(graph_assumptions([x, None, 3])) == 1
    assert graph_assumptions([3]) == []


def test_facts_do_not_depend_on_names_and_values_on_sizes() -> None:
    table, _ = sized(6, 7)
    other, _ = sized(8, 9)
    assert table.facts() == other.facts()
    assert table.values() != other.values()
    unknown = SymbolTable(table.env, (sympy.Symbol("u0"),))
    assert unknown.values() is None
