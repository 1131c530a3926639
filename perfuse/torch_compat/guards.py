"""Guards on symbols, in PyTorch's ShapeEnv: read, written down as data, and set again.

Dynamo passes a Python float (or a size) that changed between calls as a symbol. Whatever tracing
then asks of that symbol becomes a guard: a result of tracing holds for those values alone that pass
it.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.utils._sympy import functions as torch_functions

from perfuse.torch_compat.sizes import sym_leaves

# A guard as JSON: a number, a truth value, or a list of a name and its arguments.
Spelled = int | bool | list[Any]

SYMPY_FUNCTIONS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        sympy.Add, sympy.Mul, sympy.Pow, sympy.And, sympy.Or, sympy.Not, sympy.Max, sympy.Min,
        sympy.Abs, sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge,
    )
}  # fmt: skip


class CannotSpell(Exception):
    """A guard that cannot be written down."""


@dataclass(frozen=True, slots=True)
class GuardMark:
    """How many guards of each kind there were at some moment."""

    num_shape: int = 0
    num_deferred: int = 0
    num_other: int = 0


@dataclass(frozen=True, slots=True)
class SymbolTable:
    """The symbols of a captured graph, numbered in the order in which the graph mentions them."""

    env: Any  # the ShapeEnv; None outside of a trace
    symbols: tuple[sympy.Symbol, ...]

    @staticmethod
    def of(module: GraphModule) -> "SymbolTable":
        """The symbols of a graph that Dynamo just captured."""
        metas = (node.meta for node in module.graph.nodes)
        values = [meta.get("example_value", meta.get("val")) for meta in metas]
        leaves = list(sym_leaves(values))
        ordered = (s for leaf in leaves for s in sorted(leaf.node.expr.free_symbols, key=str))
        return SymbolTable(_shape_env(leaves), tuple(dict.fromkeys(ordered)))

    def facts(self) -> list[str]:
        """Everything known of the symbols but their values, independent of their names."""
        if self.env is None or not self.symbols:
            return []
        names = {symbol: sympy.Symbol(f"#{i}") for i, symbol in enumerate(self.symbols)}
        ranges = self.env.var_to_range
        rows = [
            f"{str(s).rstrip('0123456789')} {s.is_integer} {s in self.env.backed_var_to_val} "
            f"{ranges.get(s)} {self.env.replacements.get(s, '')}"
            for s in self.symbols
        ]
        known = set(self.symbols)
        guards = [g.expr for g in self.env.guards if g.expr.free_symbols & known]
        return [*rows, *sorted(str(expr.xreplace(names)) for expr in guards)]

    def values(self) -> list[str] | None:
        """The value of each symbol; None where one has none, being known from data alone."""
        if self.env is None or not set(self.symbols) <= self.env.backed_var_to_val.keys():
            return None
        return [str(_spell(self.env.backed_var_to_val[s], {})) for s in self.symbols]

    def mark(self) -> GuardMark:
        """The guards there are now."""
        tracing = TracingContext.try_get()
        context = None if tracing is None else tracing.guards_context
        num_other = 0
        if context is not None:
            num_other = len(context.dynamo_guards.inner) + len(context.aotautograd_guards)
        if self.env is None:
            return GuardMark(num_other=num_other)
        deferred = sum(map(len, self.env.deferred_runtime_asserts.values()))
        return GuardMark(len(self.env.guards), deferred, num_other)

    def guards_since(self, mark: GuardMark) -> list[Spelled]:
        """The guards that were set since then, as data; `CannotSpell` where one is not a formula
        over the symbols of this table."""
        now = self.mark()
        if (now.num_deferred, now.num_other) != (mark.num_deferred, mark.num_other):
            raise CannotSpell("a guard that is not a formula")
        if now.num_shape == mark.num_shape:
            return []
        numbers = {symbol: i for i, symbol in enumerate(self.symbols)}
        spelled = []
        for guard in self.env.guards[mark.num_shape :]:
            spelled.append(_spell(guard.expr, numbers))
            if self._read(spelled[-1]) != guard.expr:
                raise CannotSpell(str(guard.expr))
        return spelled

    def set_guards(self, spelled: Sequence[Any]) -> bool:
        """Set these guards, if all hold for the values of now; whether that is so."""
        if not spelled:
            return True
        if self.env is None:
            return False
        try:
            guards = [self._read(item) for item in spelled]
        except (CannotSpell, TypeError, ValueError, IndexError):
            return False
        hints = self.env.backed_var_to_val
        if any(guard.xreplace(hints) != sympy.true for guard in guards):
            return False
        return all(self.env.evaluate_expr(guard) == sympy.true for guard in guards)

    def _read(self, item: Any) -> Any:
        if isinstance(item, bool | int):
            return sympy.sympify(item)
        name, *args = item
        if name == "symbol":
            return self.symbols[args[0]]
        if name == "float":
            return sympy.Float(float.fromhex(args[0]))
        if name == "rational":
            return sympy.Rational(*map(int, args))
        return _function(name)(*(self._read(arg) for arg in args))


def _function(name: str) -> Any:
    found = SYMPY_FUNCTIONS.get(name) or getattr(torch_functions, name, None)
    if not isinstance(found, type) or not issubclass(found, sympy.Basic):
        raise CannotSpell(name)
    return found


def _spell(expr: Any, numbers: dict[sympy.Symbol, int]) -> Spelled:
    if expr in numbers:
        return ["symbol", numbers[expr]]
    if isinstance(expr, sympy.logic.boolalg.BooleanAtom | bool):
        return bool(expr)
    if isinstance(expr, sympy.Integer | int):
        return int(expr)
    if isinstance(expr, sympy.Float | float):
        return ["float", float(expr).hex()]
    if isinstance(expr, sympy.Rational):
        return ["rational", int(expr.p), int(expr.q)]
    name = type(expr).__name__
    if isinstance(expr, sympy.Symbol) or _function(name) is not type(expr):
        raise CannotSpell(str(expr))
    return [name, *(_spell(arg, numbers) for arg in expr.args)]


def _shape_env(leaves: Sequence[Any]) -> Any:
    """The environment of the trace that is going on, or else of these symbols."""
    tracing = TracingContext.try_get()
    mode = None if tracing is None else tracing.fake_mode
    if mode is not None and mode.shape_env is not None:
        return mode.shape_env
    return leaves[0].node.shape_env if leaves else None


def graph_assumptions(values: Iterable[Any]) -> list[str]:
    """The guards that the symbols of these values stand under, by name."""
    leaves = list(sym_leaves(values))
    if not leaves:
        return []
    env = leaves[0].node.shape_env
    symbols = {symbol for leaf in leaves for symbol in leaf.node.expr.free_symbols}
    guards = {str(guard.expr) for guard in env.guards if guard.expr.free_symbols & symbols}
    lates = itertools.chain.from_iterable(env.deferred_runtime_asserts.values())
    deferred = {str(late.expr) for late in lates if late.expr.free_symbols & symbols}
    return [f"guard {text}" for text in sorted(guards)] + [f"check {t}" for t in sorted(deferred)]


@dataclass(frozen=True, slots=True)
class SizeNames:
    """Sizes of arguments, named `s0`, `s1`, ... in order, and what tracing assumed of them.

    Dimensions that the program requires to be equal have one name; those that it requires to be
    some number are that number.
    """

    values: dict[sympy.Symbol, Any]  # a symbol of PyTorch's -> a name, or a number
    guards: tuple[Any, ...]  # formulas over the names that must be true

    @staticmethod
    def of(arguments: Iterable[Any], others: Iterable[Any]) -> "SizeNames":
        """Names for the traced arguments. The graph's `others` have the sizes they have now."""
        given = [value for value in arguments if isinstance(value, Tensor)]
        sizes = [size for value in given for size in value.shape]
        steps = [step for value in given for step in value.stride()]
        env = next((leaf.node.shape_env for leaf in sym_leaves([*given, *others])), None)
        if env is None:
            return SizeNames({}, ())
        own = dict.fromkeys(s for leaf in sym_leaves([*sizes, *steps]) for s in _symbols(leaf))
        hints = env.backed_var_to_val
        values: dict[sympy.Symbol, Any] = {s: n for s, n in hints.items() if s not in own}
        fixed = {env.replace(s): n for s, n in values.items() if env.replace(s).is_Symbol}
        names: dict[Any, Any] = {}
        for symbol in own:
            found = env.replace(symbol).xreplace(fixed)
            if not found.is_Integer:
                found = names.setdefault(found, _name(len(names)))
            values[symbol] = found
        return SizeNames(values, tuple(_assumed(env, list(own), values)))

    def named(self, value: Any) -> Any:
        """A size as a formula over the names, or a number."""
        return value.node._expr.xreplace(self.values)

    def fresh(self) -> Iterator[sympy.Symbol]:
        """Further names, for sizes that tracing did not look at."""
        num_taken = len({name for name in self.values.values() if name.is_Symbol})
        return map(_name, itertools.count(num_taken))


def _name(number: int) -> sympy.Symbol:
    return sympy.Symbol(f"s{number}", integer=True, nonnegative=True)


def _symbols(leaf: Any) -> list[sympy.Symbol]:
    """The symbols of a size as they were before tracing found some to be equal."""
    return sorted(leaf.node._expr.free_symbols, key=str)


def _assumed(
    env: Any, symbols: Sequence[sympy.Symbol], values: dict[sympy.Symbol, Any]
) -> list[Any]:
    """Guards, the range of each symbol, and the formula by which one follows from others."""
    found = [guard.expr for guard in env.guards]
    for symbol in symbols:
        found.append(sympy.Eq(symbol, env.replace(symbol)))
        known = env.var_to_range.get(symbol)
        if known is not None:
            found += [symbol >= known.lower] if known.lower.is_Integer else []
            found += [symbol <= known.upper] if known.upper.is_Integer else []
    spelled = (guard.xreplace(values) for guard in found)
    return [guard for guard in dict.fromkeys(spelled) if guard.free_symbols]


def traced_forms(module: GraphModule, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The fake tensors that stood for these while Dynamo traced; None for those not looked at."""
    values = [node.meta.get("example_value") for node in module.graph.nodes]
    mode: Any = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    if mode is None:
        return [None] * len(tensors)
    return [mode.fake_tensor_converter._get_memo(tensor) for tensor in tensors]
