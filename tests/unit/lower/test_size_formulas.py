"""Formulas of sizes as Python text: every function that PyTorch computes sizes by is spelled."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from torch.utils._sympy import functions

from perfuse.lower.symbols import host_formula
from perfuse.runtime.size_formula import compiled_formula, evaluate

SIZE = 11
OF_FLOATS = [name for name in vars(functions) if name.startswith("OpaqueUnaryFn_")]
OF_TWO_NUMBERS = [
    *(name for name in vars(functions) if name.startswith("BitwiseFn_")),
    *("LShift", "RShift", "PowByNatural", "FloorDiv", "Mod", "IntTrueDiv"),
]


def applied(name: str, size: sympy.Expr) -> Any:
    function = getattr(functions, name)
    if name in OF_TWO_NUMBERS:
        return function(size, sympy.Integer(3))
    return function(functions.IntTrueDiv(size, sympy.Integer(SIZE)))  # one: all are defined there


@pytest.mark.parametrize("name", [*OF_FLOATS, *OF_TWO_NUMBERS])
def test_spelled_as_pytorch_computes_it(name: str) -> None:
    n = sympy.Symbol("n", integer=True, positive=True)
    formula = compiled_formula(host_formula(applied(name, n)))
    wanted = float(applied(name, sympy.Integer(SIZE)))
    assert evaluate(formula, {"n": SIZE}) == pytest.approx(wanted)
