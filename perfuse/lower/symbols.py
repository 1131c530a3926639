"""The boundary to PyTorch's ShapeEnv: SymInts and sympy expressions in, index algebra out."""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch

from perfuse.errors import UnsupportedOp
from perfuse.ir import index as ix
from perfuse.ir.index import Dim
from perfuse.ir.program import sizes_from_data
from perfuse.torch_compat.sizes import UNKNOWN_LEAST, is_from_data, least_values


class Symbols:
    """Names the size symbols of one graph, and the sub-expressions only the host can compute."""

    def __init__(self) -> None:
        self.derived: dict[str, str] = {}  # name -> host formula, in order of definition
        self._known: set[str] = set()  # sizes of arguments, and what calls before have found
        self._least: dict[str, int] = {}  # by symbol, as first met: a symbol has one spelling
        self._converted: dict[sympy.Expr, Dim] = {}  # a chain has the same sizes at every step

    def learn(self, tensor: torch.Tensor) -> None:
        """Sizes and strides are not negative, whatever else their symbols stand for."""
        for value in (*tensor.shape, *tensor.stride(), tensor.storage_offset()):
            if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
                for name, least in least_values(value).items():
                    self._least[name] = max(least, 0)
                    self._known.add(name)

    def dim(self, value: int | torch.SymInt) -> Dim:
        if isinstance(value, int):
            return int(value)
        expr = value.node.expr
        found = self._converted.get(expr)
        if found is None:
            found = self._converted[expr] = self._convert(self._expression(value))
        return found

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
        if any(map(is_from_data, expr.free_symbols)):
            # Such formulas are computed at the start of a call, before any data is known.
            raise UnsupportedOp(f"size formula {expr} of a size that depends on data")
        formula = host_formula(expr)
        least = 0 if expr.is_nonnegative else UNKNOWN_LEAST
        for name, known in self.derived.items():
            if known == formula:
                return ix.symbol(name, least)
        name = f"z{len(self.derived)}"
        self.derived[name] = formula
        return ix.symbol(name, least)


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


def _of_math(function: str) -> str | None:
    """The function of `math` that one of PyTorch's stands for: `math.log2`."""
    name = function.removeprefix(_MATH)
    return f"math.{name}" if name != function and hasattr(math, name) else None


def host_formula(expr: sympy.Expr) -> str:
    """A sympy expression as Python text over symbol names."""
    if expr.is_Integer:
        return str(int(expr))
    if expr.is_Symbol:
        return str(expr.name)
    if expr.is_Boolean and expr.is_Atom:
        return str(bool(expr))
    if expr.is_Float or expr.is_Rational:
        return repr(float(expr))
    args = [host_formula(a) for a in expr.args]
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
