"""Scalar expressions as C++ statements, on vectors where they depend on the lane axis.

An `Emitter` writes into nested scopes: what does not change along the columns goes to the row's
scope and is computed once per row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perfuse.codegen import emitter
from perfuse.codegen.cpp.spelling import COMPUTE_TYPE, SPELLING, STORAGE_TYPE, literal
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Division, Indirect, Quotient
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer


@dataclass(frozen=True, slots=True)
class Value(emitter.Value):
    """A C++ expression, a vector where it has lanes."""

    @property
    def is_vector(self) -> bool:
        return bool(self.lanes)

    @property
    def vector(self) -> str:
        return self.text if self.lanes else f"pf::splat({self.text})"


class Names(emitter.Names):
    """Arguments of one C++ kernel."""

    def __init__(
        self, buffers: Mapping[str, Buffer], over: Mapping[str, str], used_once: frozenset[Expr]
    ) -> None:
        super().__init__(buffers)
        self.over = over  # buffers that overwrite another and share its argument
        self.used_once = used_once  # sigmoids that a single value uses
        self._written: set[str] = set()
        self.needs_status = False

    def argument(self, buffer: str) -> str:
        """The pointer that reads a buffer. One piece of memory has one: it is `__restrict`."""
        return super().argument(self.over.get(buffer, buffer))

    def target(self, buffer: str) -> str:
        """The pointer that writes a buffer, whatever else in the kernel uses that memory."""
        self._written.add(self.over.get(buffer, buffer))
        return self.argument(buffer)

    def is_written(self, buffer: str) -> bool:
        """Whether the text so far writes the memory of this buffer."""
        return self.over.get(buffer, buffer) in self._written

    def storage(self, buffer: str) -> str:
        return STORAGE_TYPE[self.buffers[buffer].dtype]

    def quotient(self, atom: Division, numerator: str, divisor: str) -> str:
        is_quotient = isinstance(atom, Quotient)
        if ix.is_nonnegative(ix.bounds(atom.numerator)[0]):
            return f"(({numerator}) {'/' if is_quotient else '%'} ({divisor}))"
        name = "floordiv" if is_quotient else "mod"
        return f"pf::{name}(int64_t({numerator}), int64_t({divisor}))"


@dataclass(frozen=True, slots=True)
class Placed:
    """How positions, each a step after that of the lane before, compare with a limit."""

    op: str
    place: Dim
    step: Dim | None
    limit: Expr


Scope = emitter.Scope[Value]
Resolver = emitter.Resolver[Value]

# Functions for lanes that are contiguous, a step apart, or anywhere.
_LOADS = ("loadv", "load_strided", "gather")
_STORES = ("storev", "store_strided", "scatter")
# Comparisons, and what they are with their operands exchanged.
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_LONGEST_STEP = 1 << 20  # the steps of all lanes fit 32 bits
# The forms of min and max for a limit that is not NaN.
_LIMITS = {"min": "pf::low", "max": "pf::high"}


def sigmoids_used_once(values: Iterable[Expr]) -> frozenset[Expr]:
    """Those that can be fused into the product that uses them."""
    seen: set[Expr] = set()
    uses: Counter[Expr] = Counter()
    for value in values:
        uses[value] += 1
        for e in ex.walk(value, seen):
            uses.update(e.args)
    return frozenset(e for e, count in uses.items() if e.op == "sigmoid" and count == 1)


def _is_place(bound: Dim | None) -> bool:
    """Whether a bound of places is known, and exact as a double with room for a half."""
    return isinstance(bound, int) and 0 <= bound < 1 << 50


def _is_wrapped(index: Expr) -> bool:
    """Whether negative positions count from the end: lower/families/indexing.py, `data_index`."""
    return index.op == "where" and index.args[0].op == "lt" and index.args[1].op == "add"


def _is_number(e: Expr) -> bool:
    return e.op == "const" and not math.isnan(e.attr)


class Emitter(emitter.Emitter[Names, Value]):
    """Writes the statements of values inside one sweep of a kernel."""

    def __init__(
        self, names: Names, scope: Scope, lane: Atom | None, tail: str | None, resolve: Resolver
    ) -> None:
        super().__init__(names, scope, resolve)
        self.lane = lane
        self.tail = tail  # the variable holding the number of live lanes, in a partial vector

    def at(self, scope: Scope, resolve: Resolver) -> Emitter:
        return Emitter(self.names, scope, self.lane, self.tail, resolve)

    def stays(self, e: Expr) -> bool:
        # Loads stay in place: what a stage stores may be read by the next.
        return e.num_loads > 0

    def assignment(self, name: str, text: str) -> str:
        return f"const auto {name} = {text};"

    # -- values ----------------------------------------------------------------------------

    def constant(self, e: Expr) -> Value:
        return Value(literal(e.attr, e.dtype), e.dtype, 0)

    def position(self, e: Expr) -> Value:
        text, is_vector = self.lane_index(e.attr)
        return Value(text if is_vector else f"int64_t({text})", e.dtype, is_vector)

    def operands(self, e: Expr) -> tuple[Expr, ...]:
        placed = self._placed(e)
        return self._function(e)[1] if placed is None else (placed.limit,)

    def _placed(self, e: Expr) -> Placed | None:
        """A comparison of evenly spaced positions with a value that all lanes share."""
        if e.op not in _MIRRORED or self.lane is None:
            return None
        first, second = e.args
        for op, place, limit in ((e.op, first, second), (_MIRRORED[e.op], second, first)):
            if place.op == "index" and limit.dtype is DType.I64:
                step = ix.coefficient_of(place.attr, self.lane)
                is_even = isinstance(step, int) and 0 < step <= _LONGEST_STEP
                if is_even and self.lane not in limit.variables():
                    return Placed(op, place.attr, step, limit)
        return None

    def computed(self, e: Expr, args: list[Value]) -> Value:
        if (placed := self._placed(e)) is not None:
            limit = f"{self.index(placed.place)}, {args[0].text}"
            return Value(f"pf::{placed.op}_places<{placed.step}>({limit})", e.dtype, 1)
        lanes = max((a.lanes for a in args), default=0)
        spelled = [a.vector if lanes else a.text for a in args]
        if e.op == "cast":
            text = f"pf::cast<{COMPUTE_TYPE[e.dtype]}>({spelled[0]})"
        elif e.op == "round_to":
            text = f"pf::round_to<{STORAGE_TYPE[e.attr]}>({spelled[0]})"
        elif e.op == "divisor":
            self.names.needs_status = True
            last = f", {self.tail or 'pf::lanes'}" if lanes else ""
            text = f"pf::divisor({spelled[0]}, status{last})"
        elif e.op in ("rand_f32", "randn_f32", "randint64"):
            text = self._random(e, args)
            lanes = args[1].lanes
        elif e.op == "where" and lanes and not args[0].lanes and e.dtype.is_float:
            text = f"({args[0].text} ? {spelled[1]} : {spelled[2]})"
        elif e.op in _LIMITS and e.dtype.is_float and any(_is_number(a) for a in e.args):
            # One instruction that gives its second operand where either is NaN.
            limit, other = spelled if _is_number(e.args[0]) else reversed(spelled)
            text = f"{_LIMITS[e.op]}({limit}, {other})"
        else:
            text = f"{self._function(e)[0]}({', '.join(spelled)})"
        return Value(text, e.dtype, lanes)

    def cast(self, value: Value, dtype: DType) -> str:
        return f"pf::cast<{COMPUTE_TYPE[dtype]}>({value.text})"

    def _function(self, e: Expr) -> tuple[str, tuple[Expr, ...]]:
        """The function to call and its arguments: a * sigmoid(x) is one function."""
        for a, s in (e.args, e.args[::-1]) if e.op == "mul" else ():
            # For a sigmoid that a whole row shares, multiplying is better than dividing.
            if s in self.names.used_once and s.variables() >= a.variables():
                return "pf::times_sigmoid", (a, s.args[0])
        return SPELLING.get(e.op, e.op), e.args

    def _random(self, e: Expr, args: list[Value]) -> str:
        """The seed is one number for all lanes; so are the bounds of randint."""
        place = e.args[1]
        if e.op == "rand_f32" and place.op == "index" and self._stride(place.attr) == 1:
            # Neighbours share what is drawn: a quarter of the work.
            return f"{SPELLING[e.op]}_row({args[0].text}, {self.index(place.attr)})"
        return f"{SPELLING[e.op]}({', '.join(a.text for a in args)})"

    # -- indices ---------------------------------------------------------------------------

    def lane_index(self, index: Dim) -> tuple[str, bool]:
        """(text, is_vector) of an index; a vector when it varies along the lanes."""
        if self._varies(index):
            return self._vector_index(index), True
        return self.index(index), False

    def _varies(self, index: Dim) -> bool:
        return self.lane is not None and self.lane in ex.index_variables(index)

    def check(self, source: Value, value: Expr, size: Dim) -> Value:
        self.names.needs_status = True
        size_text = self.index(size)
        limit = f"{size_text}, {size_text if _is_wrapped(value) else 0}"
        suffix, live = ("_n", f", {self.tail or 'pf::lanes'}") if source.is_vector else ("", "")
        text = f"pf::checked{suffix}({source.text}, {limit}, status{live})"
        return self.named(Value(text, DType.I64, source.lanes))

    def _vector_index(self, index: Dim) -> str:
        if isinstance(index, int) or not self._varies(index):
            return f"pf::splat(int64_t({self.index(index)}))"
        if (found := self.scope.known_indices.get(index)) is not None:
            return found
        vectors, fixed = [], [f"int64_t({index.const})"] if index.const else []
        for monomial, coefficient in index.terms:
            of_lanes, shared = self._factors(monomial)
            times = [f"int64_t({coefficient})"] if coefficient != 1 else []
            scale = " * ".join([*shared, *times])
            if of_lanes:
                vectors.append(
                    " * ".join([*of_lanes, *([f"pf::splat({scale})"] if shared else times)])
                )
            else:
                fixed.append(scale)
        # g++ 12 adds a scalar to a vector of 64 bits lane by lane, through memory.
        pieces = [*vectors, f"pf::splat({' + '.join(fixed)})"] if fixed else vectors
        name = self.names.local()
        self.line(f"const pf::vec<int64_t> {name} = {' + '.join(pieces)};")
        self.scope.known_indices[index] = name
        return name

    def _factors(self, monomial: tuple[Atom, ...]) -> tuple[list[str], list[str]]:
        """The text of the factors that vary along the lanes, and of the others."""
        of_lanes, shared = [], []
        for atom in monomial:
            text = self._vector_atom(atom)
            if text is None:
                shared.append(f"int64_t({self.atom(atom)})")
            else:
                of_lanes.append(text)
        return of_lanes, shared

    def _vector_atom(self, atom: Atom) -> str | None:
        """The vector of an atom that varies along the lanes."""
        if atom is self.lane:
            return f"pf::iota<int64_t>({atom})"
        if isinstance(atom, Indirect):
            found = self.checked(atom)
            return found.text if found.is_vector else None
        if isinstance(atom, Division) and any(map(self._varies, atom.operands)):
            return self._vector_quotient(atom)
        return None

    def _vector_quotient(self, atom: Division) -> str:
        """Machines have no vector division of 64 bits: by a constant it is done in other ways."""
        is_quotient, divisor = isinstance(atom, Quotient), atom.divisor
        if isinstance(divisor, int) and divisor > 0 and divisor.bit_count() == 1:
            step = f">> {divisor.bit_length() - 1}" if is_quotient else f"& int64_t({divisor - 1})"
            return f"({self._vector_index(atom.numerator)} {step})"
        name, (low, high) = "floordiv" if is_quotient else "mod", ix.bounds(atom.numerator)
        if isinstance(divisor, int) and divisor > 0 and _is_place(low) and _is_place(high):
            return f"pf::place_{name}({self._vector_index(atom.numerator)}, int64_t({divisor}))"
        a, b = map(self._vector_index, atom.operands)
        return f"pf::{name}({a}, {b})"

    # -- memory ----------------------------------------------------------------------------

    def read(self, e: Expr) -> Value:
        """A load from memory, in the cheapest form its index allows."""
        buffer, index = e.attr
        pointer, kind = self.names.argument(buffer), self.names.storage(buffer)
        mask = self.value(e.args[0]) if e.args else None
        stride = self._stride(index)
        if stride == 0 and (mask is None or not mask.is_vector):
            text = f"pf::load1<{kind}>({pointer} + {self.index(index)})"
            if mask is not None:
                text = f"({mask.text} ? {text} : {self.value(e.args[1]).text})"
            return self.named(Value(text, e.dtype, False))
        if mask is not None:
            return self.named(self._masked_load(e, pointer, kind, mask, stride))
        form, place = self._place(pointer, index, stride)
        text = f"pf::{_LOADS[form]}{self._suffix}<{kind}>({place}{self._live})"
        return self.named(Value(text, e.dtype, True))

    def _masked_load(
        self, e: Expr, pointer: str, kind: str, mask: Value, stride: Dim | None
    ) -> Value:
        index, fill, live = e.index, self.value(e.args[1]), mask.vector
        if not mask.is_vector and e.dtype is not DType.BOOL:
            # All lanes or none, such as a row of padding: a branch that is predicted.
            form, place = self._place(pointer, index, stride)
            text = f"pf::{_LOADS[form]}{self._suffix}<{kind}>({place}{self._live})"
            return Value(f"({mask.text} ? {text} : {fill.vector})", e.dtype, True)
        if self.tail is not None:
            live = f"pf::land({live}, pf::first_lanes({self.tail}))"
        scalar_fill = literal(0, e.dtype) if fill.is_vector else fill.text
        if stride == 1:
            text = f"pf::load_mask<{kind}>({pointer} + {self.index(index)}, {live}, {scalar_fill})"
        else:
            at = self._vector_index(index)
            text = f"pf::gather_mask<{kind}>({pointer}, {at}, {live}, {scalar_fill})"
        if fill.is_vector:
            text = f"pf::where({mask.vector}, {text}, {fill.text})"
        return Value(text, e.dtype, True)

    def update(self, place: str, kind: str, combine: str, value: Value) -> None:
        """Combine a value into contiguous memory."""
        form, text = ("1", value.text) if self.lane is None else (f"v{self._suffix}", value.vector)
        live = "" if self.lane is None else self._live
        held = f"{combine}(pf::load{form}<{kind}>({place}{live}), {text})"
        self.line(f"pf::store{form}<{kind}>({place}, {held}{live});")

    @property
    def _suffix(self) -> str:
        """Of functions that work on part of a vector."""
        return "" if self.tail is None else "_n"

    @property
    def _live(self) -> str:
        """The last argument of these."""
        return "" if self.tail is None else f", {self.tail}"

    def _place(self, pointer: str, index: Dim, stride: Dim | None) -> tuple[int, str]:
        """Which of `_LOADS` and `_STORES` reaches the lanes of an index, and by which arguments."""
        if stride is None:
            return 2, f"{pointer}, {self._vector_index(index)}"
        # The lane variable holds the position of the first lane.
        step = "" if stride == 1 else f", {self.index(stride)}"
        return int(stride != 1), f"{pointer} + {self.index(index)}{step}"

    def _stride(self, index: Dim) -> Dim | None:
        return 0 if self.lane is None else ix.coefficient_of(index, self.lane)

    def store(self, buffer: str, index: Dim, value: Value, *, stream: bool = False) -> None:
        pointer, kind = self.names.target(buffer), self.names.storage(buffer)
        stride = self._stride(index)
        if stride == 0:
            self.line(f"pf::store1<{kind}>({pointer} + {self.index(index)}, {value.text});")
            return
        form, place = self._place(pointer, index, stride)
        name = f"{_STORES[form]}{self._suffix}"
        if stream and stride == 1 and self.tail is None:
            name = "streamv"
        self.line(f"pf::{name}<{kind}>({place}, {value.vector}{self._live});")
