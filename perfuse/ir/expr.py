"""Scalar code as a hash-consed expression DAG: fusing is substitution, equality is identity.

An expression computes one element. Its dtype is always a compute dtype (small floats are float32
here: loads widen, stores narrow, `round_to` rounds in between where the program says so).
"""

from __future__ import annotations

import hashlib
import math
import operator
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Indirect, Variable
from perfuse.ir.dtype import DType
from perfuse.ir.index import Dim
from perfuse.ir.post_order import post_order


@dataclass(frozen=True, slots=True)
class ScalarOp:
    """Meaning of one scalar op: its arity, the dtype of its result, what it costs."""

    arity: int
    result: str  # "same": of the last argument; "bool"; "attr": named by the attribute
    cost: int  # in units of one add; steers recomputation, never correctness


def _rows() -> dict[str, ScalarOp]:
    table: dict[str, ScalarOp] = {}

    def put(names: str, arity: int, result: str, cost: int) -> None:
        for name in names.split():
            table[name] = ScalarOp(arity, result, cost)

    put("neg abs sign floor ceil trunc round bit_not", 1, "same", 1)
    put("sqrt rsqrt reciprocal", 1, "same", 4)
    put("exp_mid", 1, "same", 8)  # exp of a value known to be within [-87, 88]
    put("exp2_mid", 1, "same", 6)  # two to a power known to be within [-126, 127]
    put("exp exp2 expm1 log log2 log10 log1p sigmoid tanh", 1, "same", 12)
    put("sin cos tan sinh cosh asin acos atan asinh acosh atanh erf erfc erfinv", 1, "same", 16)
    put("lgamma digamma", 1, "same", 60)
    put("add sub mul min max fmin fmax bit_and bit_or bit_xor shl shr copysign", 2, "same", 1)
    put("div", 2, "same", 4)
    put("floordiv truncdiv mod fmod", 2, "same", 10)
    put("divisor", 1, "same", 1)  # an integer, reported to the caller if it is zero
    put("pow atan2 hypot nextafter", 2, "same", 30)
    put("fma", 3, "same", 1)
    put("eq ne lt le gt ge", 2, "bool", 1)
    put("land lor lxor", 2, "bool", 1)
    put("lnot isnan isinf isfinite signbit", 1, "bool", 1)
    put("where", 3, "same", 1)
    put("cast", 1, "attr", 1)
    put("round_to", 1, "same", 2)
    put("to_bits from_bits", 1, "attr", 1)  # of a float32, as an int32 and back
    put("rand_f32", 2, "attr", 30)
    put("randn_f32", 2, "attr", 60)
    put("randint64", 4, "attr", 30)
    return table


SCALAR_OPS = _rows()
_LEAF_COST = {"const": 0, "index": 1, "load": 0}
_COST_LIMIT = 1 << 20


class Expr:
    """One scalar value. Build with the functions of this module, never directly."""

    __slots__ = "__weakref__ _loads _vars args attr cost dtype num_loads op".split()
    op: str
    args: tuple[Expr, ...]
    dtype: DType
    attr: Any
    cost: int
    num_loads: int
    _vars: frozenset[Variable] | None
    _loads: tuple[Expr, ...] | None

    def __repr__(self) -> str:
        return self.short_text()

    def text(self) -> str:
        """The expression as Python-like text, shared parts written out again."""
        known: dict[Expr, str] = {}
        for e in post_order(self, lambda e: e.args, known.__contains__):
            known[e] = e._text(", ".join(known[a] for a in e.args))
        return known[self]

    def _text(self, inner: str) -> str:
        if self.op == "const":
            return f"{self.attr!r}:{self.dtype}" if self.dtype is not DType.F32 else repr(self.attr)
        if self.op == "load":
            name, index = self.attr
            masked = f" if {inner}" if inner else ""
            return f"{name}[{index!r}{masked}]"
        if self.op == "index":
            return f"index({self.attr!r})"
        if self.op == "cast":
            return f"{self.dtype}({inner})"
        if self.op == "round_to":
            return f"round_to_{self.attr}({inner})"
        return f"{self.op}({inner})"

    def short_text(self) -> str:
        """The text if it is short, else a name that is the same in every run."""
        if self.cost + 4 * self.num_loads <= 64:
            return self.text()
        return f"v{self.digest()}"

    def digest(self) -> str:
        """A hash of the structure, linear in the size of the DAG."""
        known: dict[Expr, str] = {}
        for e in walk(self, set()):
            parts = [e.op, str(e.dtype), repr(e.attr), *(known[a] for a in e.args)]
            known[e] = hashlib.blake2b("|".join(parts).encode(), digest_size=8).hexdigest()
        return known[self]

    @property
    def buffer(self) -> str:
        """The buffer that a load reads."""
        assert self.op == "load"
        return str(self.attr[0])

    @property
    def index(self) -> Dim:
        """Where a load reads; the number that an index is."""
        found: Dim = self.attr[1] if self.op == "load" else self.attr
        return found

    def variables(self) -> frozenset[Variable]:
        """The loop variables this value depends on."""
        if self._vars is None:
            for e in post_order(self, _parts, lambda e: e._vars is not None):
                e._vars = _own_variables(e).union(*(a._vars or () for a in e.args))
        assert self._vars is not None
        return self._vars


def _parts(value: Expr) -> list[Expr]:
    """The values it is made of: its arguments, then those inside of its index."""
    if value.op not in ("load", "index"):
        return list(value.args)
    return [*value.args, *(atom.value for atom in value_atoms(value.index))]


def _own_variables(value: Expr) -> frozenset[Variable]:
    return index_variables(value.index) if value.op in ("load", "index") else frozenset()


def index_variables(index: Dim) -> frozenset[Variable]:
    """Loop variables of an index, also those inside values read from data."""
    found: set[Variable] = set()
    for atom in ix.atoms_of(index):
        if isinstance(atom, Variable):
            found.add(atom)
        elif isinstance(atom, Indirect):
            found |= atom.value.variables()
    return frozenset(found)


_INTERNED: WeakValueDictionary[tuple[Any, ...], Expr] = WeakValueDictionary()


def _make(op: str, args: tuple[Expr, ...], dtype: DType, attr: Any = None) -> Expr:
    key_attr = (type(attr), repr(attr)) if op == "const" else attr
    key = (op, args, dtype, key_attr)
    found = _INTERNED.get(key)
    if found is None:
        found = Expr()
        found.op, found.args, found.dtype, found.attr, found._vars = op, args, dtype, attr, None
        found._loads = None
        own = SCALAR_OPS[op].cost if op in SCALAR_OPS else _LEAF_COST[op]
        cost = own + sum(a.cost for a in args)
        loads = (op == "load") + sum(a.num_loads for a in args)
        if op in ("load", "index"):
            inside = [atom.value for atom in value_atoms(found.index)]
            cost, loads = (
                cost + sum(v.cost for v in inside),
                loads + sum(v.num_loads for v in inside),
            )
        found.cost, found.num_loads = min(cost, _COST_LIMIT), min(loads, _COST_LIMIT)
        _INTERNED[key] = found
    return found


def const(value: bool | int | float, dtype: DType) -> Expr:
    """A literal, held in the Python type that prints the same on every machine."""
    if dtype is DType.BOOL:
        return _make("const", (), dtype, bool(value))
    if dtype.is_float:
        return _make("const", (), dtype.compute, float(value))
    return _make("const", (), dtype, int(value))


def load(buffer: str, index: Dim, dtype: DType) -> Expr:
    """The element of a buffer at an index; `dtype` is the buffer's storage dtype."""
    return _make("load", (), dtype.compute, (buffer, index))


def masked_load(buffer: str, index: Dim, dtype: DType, mask: Expr, fill: Expr) -> Expr:
    """A load that touches memory only where the mask holds, and is `fill` elsewhere."""
    if mask.op == "const":
        return load(buffer, index, dtype) if mask.attr else fill
    return _make("load", (mask, fill), dtype.compute, (buffer, index))


def renamed_load(made: Expr, buffer: str, index: Dim) -> Expr:
    """The same load, masked or not, of another buffer."""
    return _make("load", made.args, made.dtype, (buffer, index))


def load_at(read: Expr, index: Dim) -> Expr:
    """The same load, masked or not, at another index."""
    return _make("load", read.args, read.dtype, (read.buffer, index))


def index_value(index: Dim) -> Expr:
    """An index as a 64-bit integer value."""
    if isinstance(index, int):
        return const(index, DType.I64)
    return _make("index", (), DType.I64, index)


def cast(value: Expr, dtype: DType) -> Expr:
    """Conversion to the compute type of `dtype`; no rounding to small floats (see `round_to`)."""
    dtype = dtype.compute
    if value.dtype is dtype:
        return value
    if value.op == "const" and not (dtype.is_int and not math.isfinite(value.attr)):
        if dtype.is_float or dtype is DType.BOOL or dtype is DType.I64:
            return const(_rounded_f32(value.attr) if dtype is DType.F32 else value.attr, dtype)
    return _make("cast", (value,), dtype)


def _rounded_f32(value: float) -> float:
    """Keep float32 literals exactly representable, so that printing and folding agree."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


# Every integer of eight bits is a value of these types.
_BYTES, _HOLD_BYTES = (DType.I8, DType.U8, DType.BOOL), (DType.BF16, DType.F16)


def round_to(value: Expr, dtype: DType) -> Expr:
    """Round a float32 value through a small float type, as storing and loading it would."""
    if not dtype.is_narrow_float or (value.op == "round_to" and value.attr is dtype):
        return value
    if dtype in _HOLD_BYTES and value.op == "cast" and value.args[0].dtype in _BYTES:
        return value
    return _make("round_to", (cast(value, DType.F32),), DType.F32, dtype)


def apply(op: str, *args: Expr, dtype: DType | None = None) -> Expr:
    """One scalar op over values of equal dtype (`where` takes a bool first)."""
    info = SCALAR_OPS[op]
    assert len(args) == info.arity, f"{op} takes {info.arity} values, got {len(args)}"
    folded = _folded(op, args)
    if folded is not None:
        return folded
    result = args[-1].dtype if info.result == "same" else dtype
    if info.result == "bool":
        result = DType.BOOL
    assert result is not None
    return _make(op, args, result)


_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def _folded(op: str, args: tuple[Expr, ...]) -> Expr | None:
    """Simplify masks of which some parts are known."""
    if op == "where" and args[0].op == "const":
        return args[1] if args[0].attr else args[2]
    if op in _COMPARISONS and all(a.op == "const" for a in args):
        return const(_COMPARISONS[op](args[0].attr, args[1].attr), DType.BOOL)
    if op not in ("land", "lor"):
        return None
    for this, other in (args, args[::-1]):
        if this.op == "const":
            if op == "land":
                return other if this.attr else this
            return this if this.attr else other
    return None


class Substitution:
    """Replaces loop variables throughout expressions, sharing work between calls."""

    def __init__(
        self, mapping: Mapping[Atom, Dim], on_load: Callable[[Expr], Expr] | None = None
    ) -> None:
        self._mapping = mapping
        self._on_load = on_load
        self._done: dict[Expr, Expr] = {}

    def __call__(self, value: Expr) -> Expr:
        if value not in self._done:
            for e in post_order(value, _parts, self._done.__contains__):
                self._done[e] = self._rewrite(e)
        return self._done[value]

    def index(self, index: Dim) -> Dim:
        return ix.substitute(index, self._mapping, self)

    def _rewrite(self, value: Expr) -> Expr:
        args = tuple([self._done[a] for a in value.args])
        if value.op == "load":
            name, index = value.attr
            made = _make("load", args, value.dtype, (name, self.index(index)))
            if args and args[0].op == "const":
                made = _make("load", (), value.dtype, made.attr) if args[0].attr else args[1]
            return self._on_load(made) if self._on_load and made.op == "load" else made
        if value.op == "index":
            return index_value(self.index(value.attr))
        if args == value.args:
            return value
        if value.op in ("where", "land", "lor", *_COMPARISONS):
            return apply(value.op, *args)
        return _make(value.op, args, value.dtype, value.attr)


def substitute(value: Expr, mapping: Mapping[Atom, Dim]) -> Expr:
    return Substitution(mapping)(value) if mapping else value


def walk(value: Expr, seen: set[Expr]) -> list[Expr]:
    """Every distinct sub-expression, arguments before users, also those inside indices."""
    order: list[Expr] = []
    if value in seen:
        return order
    for e in post_order(value, _parts, seen.__contains__):
        seen.add(e)
        order.append(e)
    return order


def value_atoms(index: Dim) -> list[Indirect]:
    found = [a for a in ix.atoms_of(index) if isinstance(a, Indirect)]
    return sorted(found, key=lambda atom: atom.sort_key)


def index_values(value: Expr) -> list[Expr]:
    """The values inside the index of a load or an index, as the integers they are used as."""
    return [cast(atom.value, DType.I64) for atom in value_atoms(value.index)]


def loads_of(value: Expr) -> list[Expr]:
    """The loads a value performs, in evaluation order."""
    if value._loads is not None:
        return list(value._loads)
    found = [e for e in walk(value, set()) if e.op == "load"]
    if value.op != "load":  # which would keep itself alive
        value._loads = tuple(found)
    return found


def guard_loads(value: Expr, mask: Expr) -> Expr:
    """The same formula with every load made under a mask (0 where it does not hold)."""

    def guard(made: Expr) -> Expr:
        held = apply("land", made.args[0], mask) if made.args else mask
        fill = made.args[1] if made.args else const(0, made.dtype)
        return _make("load", (held, fill), made.dtype, made.attr)

    return Substitution({}, guard)(value)
