"""The boundary to PyTorch's ShapeEnv: SymInts and sympy expressions in, index algebra out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy
import torch

from perfuse.errors import UnsupportedOp
from perfuse.ir import index as ix
from perfuse.ir.index import Dim
from perfuse.ir.program import SizeFormula, sizes_from_data
from perfuse.torch_compat.sizes import UNKNOWN_LEAST, is_from_data, least_values

_PLACE = "place_of({0}, {1})"  # by an index and a size


class Symbols:
    """Names the size symbols of one graph, and the sub-expressions only the host can compute."""

    def __init__(self) -> None:
        self.derived: list[SizeFormula] = []  # in order of definition
        self._known: set[str] = set()  # sizes of arguments, and what calls before have found
        self._given: dict[sympy.Expr, str] = {}  # numbers the program has, and their names there
        self._defined: dict[str, tuple[str, ...]] = {}  # by name, what its formula needs of data
        self._places: dict[tuple[sympy.Expr, sympy.Expr], SizeFormula] = {}  # by index and size
        self._checked: dict[
            tuple[sympy.Expr, bool], tuple[int, SizeFormula]
        ] = {}  # by size and end
        self._least: dict[str, int] = {}  # by symbol, as first met: a symbol has one spelling
        self._converted: dict[sympy.Expr, Dim] = {}  # a chain has the same sizes at every step

    def learn(self, tensor: torch.Tensor) -> None:
        """Sizes and strides are not negative, whatever else their symbols stand for."""
        for value in (*tensor.shape, *tensor.stride(), tensor.storage_offset()):
            if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
                for name, least in least_values(value).items():
                    self._least[name] = max(least, 0)
                    self._known.add(name)

    def learn_formulas(self, name: str, tensor: torch.Tensor) -> None:
        """Sizes of an argument by formulas of data that no argument gives: it has their value."""
        for axis, size in enumerate(tensor.shape):
            expr = sympy.Integer(size) if isinstance(size, int) else size.node.expr
            if expr not in self._given and not self._can_solve(expr):
                made = SizeFormula(f"z{len(self.derived)}", f"{name}.size({axis})")
                self.derived.append(made)
                self._given[expr] = made.symbol
                self._known.add(made.symbol)

    def _can_solve(self, expr: sympy.Expr) -> bool:
        """Whether an argument gives all symbols from data, or this size the one that is left."""
        missing = {s for s in expr.free_symbols if is_from_data(s)}
        missing = {s for s in missing if s.name not in self._known}
        terms = [term for term in expr.args if term.free_symbols & missing] if expr.is_Add else []
        return not missing or expr.is_Symbol or (len(terms) == 1 and terms[0].is_Symbol)

    def dim(self, value: int | torch.SymInt) -> Dim:
        if isinstance(value, int):
            return int(value)
        expr = value.node.expr
        found = self._converted.get(expr)
        if found is None:
            found = self._converted[expr] = self._convert(self._expression(value))
        return found

    def learn_number(self, value: torch.SymInt) -> bool:
        """An argument that is a size symbol, and has its name; False if it is a formula."""
        expr = value.node.expr
        if expr.is_Symbol:
            self._known.add(expr.name)
        return bool(expr.is_Symbol)

    def give(self, value: Any, name: str) -> None:
        """An argument or a result of a call is this number, which may be a formula of data."""
        expr = value.node.expr
        if any(map(is_from_data, expr.free_symbols)):
            self._given.setdefault(expr, name)
            self._known.add(name)

    def is_unknown_symbol(self, value: int | torch.SymInt) -> bool:
        """Whether it is one symbol from data that nothing so far gives."""
        expr = None if isinstance(value, int) else value.node.expr
        return expr is not None and is_from_data(expr) and expr.name not in self._known

    def define(self, value: torch.SymInt, formula: str, *parts: int | torch.SymInt) -> None:
        """A symbol that is not negative has the value of this formula, with the parts as {}."""
        name = value.node.expr.name
        self._least[name] = max(least_values(value)[name], 0)
        self._defined[name] = self._derive(name, formula, parts).inputs

    def place(self, index: int | torch.SymInt, size: int | torch.SymInt) -> Dim:
        """The place along an axis that an index means, which the host checks."""
        pair = _expr(index), _expr(size)
        if pair not in self._places:
            name = f"z{len(self.derived)}"
            self._places[pair] = self._derive(name, _PLACE, (index, size))
        made = self._places[pair]
        return ix.symbol(made.symbol, 0, is_from_data=bool(made.inputs))

    def check_place(self, index: int, size: int | torch.SymInt) -> None:
        """Have the host check that there is such a place: of several, the furthest from its end."""
        key = _expr(size), index < 0
        if key not in self._checked:
            self._checked[key] = index, self._derive(f"z{len(self.derived)}", _PLACE, (index, size))
        known, made = self._checked[key]
        if abs(index) > abs(known):
            further = self._formula(made.symbol, _PLACE, (index, size))
            self.derived[self.derived.index(made)] = further
            self._checked[key] = index, further

    def _derive(self, name: str, formula: str, parts: Sequence[int | torch.SymInt]) -> SizeFormula:
        made = self._formula(name, formula, parts)
        self.derived.append(made)
        self._known.add(name)
        return made

    def _formula(self, name: str, formula: str, parts: Sequence[int | torch.SymInt]) -> SizeFormula:
        exprs = [*map(_expr, parts)]
        inputs = dict.fromkeys(symbol for expr in exprs for symbol in self._data_in(expr))
        text = formula.format(*(host_formula(expr, self._given) for expr in exprs))
        return SizeFormula(name, text, tuple(inputs))

    def unknown(self, sizes: Iterable[Dim]) -> list[str]:
        """The symbols from data that neither an argument nor a call so far gives."""
        return [name for name in sizes_from_data(sizes) if name not in self._known]

    def can_compute(self, formula: SizeFormula) -> bool:
        """Whether arguments or calls so far give all inputs of a formula."""
        return all(name in self._known for name in formula.inputs)

    def newly_known(self, size: Dim) -> list[str]:
        """The symbol that this size is, where it comes from data and is met for the first time."""
        is_symbol = ix.as_atom(size) is not None
        found = [s for s in sizes_from_data([size]) if is_symbol and s not in self._known]
        self._known.update(found)
        return found

    def _expression(self, value: torch.SymInt) -> sympy.Expr:
        for name, least in least_values(value).items():
            self._least.setdefault(name, least)
        return sympy.sympify(value.node.expr)

    def dims(self, values: Any) -> tuple[Dim, ...]:
        return tuple(self.dim(v) for v in values)

    def strides(self, values: Any) -> tuple[Dim, ...]:
        """Steps through memory, in which PyTorch counts an empty axis as one of a single element.

        There is nothing to step to then, and a stride that is the size itself makes a flat loop.
        """
        return tuple(int(v) if isinstance(v, int) else self._stride(v) for v in values)

    def _stride(self, value: torch.SymInt) -> Dim:
        return self._convert(self._expression(value).replace(_is_floored, _unfloored))

    def _convert(self, expr: sympy.Expr) -> Dim:
        if expr.is_Integer:
            return int(expr)
        if expr in self._given:
            return ix.symbol(self._given[expr], _least(expr), is_from_data=True)
        if expr.is_Symbol:
            return ix.symbol(expr.name, self._least[expr.name], is_from_data(expr))
        if expr.is_Add:
            return sum(self._convert(arg) for arg in expr.args)
        if expr.is_Mul and all(a.is_integer for a in expr.args):
            return ix.product([self._convert(a) for a in expr.args])
        if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
            return ix.product([self._convert(expr.base)] * int(expr.exp))
        function = type(expr).__name__
        if function in ("FloorDiv", "CleanDiv"):
            return ix.floordiv(*(self._convert(a) for a in expr.args))
        if function in ("Mod", "PythonMod"):
            return ix.mod(*(self._convert(a) for a in expr.args))
        return self._opaque(expr)

    def _opaque(self, expr: sympy.Expr) -> Dim:
        """A formula outside the algebra: the host computes it once, kernels see a symbol."""
        text, inputs = host_formula(expr, self._given), tuple(self._data_in(expr))
        found = [formula.symbol for formula in self.derived if formula.text == text]
        name = found[0] if found else f"z{len(self.derived)}"
        if not found:
            self.derived.append(SizeFormula(name, text, inputs))
            self._known.add(name)
        return ix.symbol(name, _least(expr), is_from_data=bool(inputs))

    def _data_in(self, expr: sympy.Basic) -> list[str]:
        """The names of the numbers from data that a formula is computed from."""
        if expr in self._given:
            return [self._given[expr]]
        if expr.is_Symbol:
            own = [expr.name] if is_from_data(expr) else []
            return [*self._defined.get(expr.name, own)]
        names = (name for argument in expr.args for name in self._data_in(argument))
        return list(dict.fromkeys(names))


def _expr(number: int | torch.SymInt) -> sympy.Expr:
    return sympy.sympify(number if isinstance(number, int) else number.node.expr)


def _least(expr: sympy.Expr) -> int:
    return 0 if expr.is_nonnegative else UNKNOWN_LEAST


def _is_floored(expr: sympy.Basic) -> bool:
    """max(1, a size)"""
    return type(expr).__name__ == "Max" and len(expr.args) == 2 and 1 in expr.args


def _unfloored(floored: sympy.Expr) -> sympy.Expr:
    first, second = floored.args
    return second if first == 1 else first


# Python's spelling of the functions that PyTorch computes sizes by.
_INFIX = {"Add": " + ", "Mul": " * ", "Pow": " ** ", "PowByNatural": " ** ", "FloatPow": " ** ",
          "FloorDiv": " // ", "CleanDiv": " // ", "Mod": " % ", "PythonMod": " % ",
          "IntTrueDiv": " / ", "FloatTrueDiv": " / ", "LShift": " << ", "RShift": " >> ",
          "BitwiseFn_bitwise_and": " & ", "BitwiseFn_bitwise_or": " | ",
          "BitwiseFn_bitwise_xor": " ^ ", "And": " and ", "Or": " or ", "StrictLessThan": " < ",
          "LessThan": " <= ", "StrictGreaterThan": " > ", "GreaterThan": " >= ",
          "Equality": " == ", "Unequality": " != "}  # fmt: skip
_CALLS = {"Max": "max", "Min": "min", "ToFloat": "float", "TruncToInt": "int",
          "TruncToFloat": "math.trunc", "CeilToInt": "math.ceil", "FloorToInt": "math.floor",
          "RoundToInt": "round", "RoundDecimal": "round", "Identity": "int",
          "Abs": "abs"}  # fmt: skip
_MATH = "OpaqueUnaryFn_"
_NONE: Mapping[sympy.Expr, str] = MappingProxyType({})


def _of_math(function: str) -> str | None:
    """The function of `math` that one of PyTorch's stands for: `math.log2`."""
    name = function.removeprefix(_MATH)
    return f"math.{name}" if name != function and hasattr(math, name) else None


def host_formula(expr: sympy.Expr, given: Mapping[sympy.Expr, str] = _NONE) -> str:
    """A sympy expression as Python text over symbol names, and the names of what is given."""
    if expr in given:
        return given[expr]
    if expr.is_Integer:
        return str(int(expr))
    if expr.is_Symbol:
        return str(expr.name)
    if expr.is_Boolean and expr.is_Atom:
        return str(bool(expr))
    if expr.is_Float or expr.is_Rational:
        return repr(float(expr))
    args = [host_formula(a, given) for a in expr.args]
    function = type(expr).__name__
    if function in _INFIX:
        return "(" + _INFIX[function].join(args) + ")"
    call = _CALLS.get(function) or _of_math(function)
    if call is not None:
        return f"{call}({', '.join(args)})"
    if function == "Not":
        return f"(not {args[0]})"
    if function == "Where":
        return f"({args[1]} if {args[0]} else {args[2]})"
    raise UnsupportedOp(f"size formula {expr} ({function})")
