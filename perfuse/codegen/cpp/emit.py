"""Scalar expressions as C++ statements, on vectors where they depend on the lane axis.

An `Emitter` writes into nested scopes: what does not change along the columns goes to the row's
scope and is computed once a row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from perfuse.codegen.cpp.spelling import COMPUTE_TYPE, SPELLING, STORAGE_TYPE, literal
from perfuse.codegen.scope import Scope as ScopeOf
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Atom, Dim
from perfuse.ir.post_order import post_order
from perfuse.ir.program import Buffer


@dataclass(frozen=True, slots=True)
class Value:
    """A C++ expression: its text, dtype, and whether it is a vector."""

    text: str
    dtype: DType
    is_vector: bool

    @property
    def vector(self) -> str:
        return self.text if self.is_vector else f"pf::splat({self.text})"


class Names:
    """Arguments of one kernel, numbered by first use so that equal kernels have equal text."""

    def __init__(
        self, buffers: dict[str, Buffer], over: Mapping[str, str], used_once: frozenset[Expr]
    ) -> None:
        self.buffers = buffers
        self.over = over  # buffers that are written over another, which they share an argument with
        self.used_once = used_once  # sigmoids of which a single value is made
        self.arguments: dict[str, str] = {}  # buffer -> a0, a1, ...
        self.symbols: dict[str, str] = {}  # size symbol -> n0, n1, ...
        self._written: set[str] = set()
        self.needs_status = False
        self._num_locals = 0

    def argument(self, buffer: str) -> str:
        """The pointer that reads a buffer. One piece of memory has one: it is `__restrict`."""
        buffer = self.over.get(buffer, buffer)
        return self.arguments.setdefault(buffer, f"a{len(self.arguments)}")

    def target(self, buffer: str) -> str:
        """The pointer that writes a buffer, whatever else of its kernel has that memory."""
        self._written.add(self.over.get(buffer, buffer))
        return self.argument(buffer)

    def is_written(self, buffer: str) -> bool:
        """Whether the text so far writes the memory of this buffer."""
        return self.over.get(buffer, buffer) in self._written

    def symbol(self, name: str) -> str:
        return self.symbols.setdefault(name, f"n{len(self.symbols)}")

    def local(self) -> str:
        self._num_locals += 1
        return f"t{self._num_locals}"

    def storage(self, buffer: str) -> str:
        return STORAGE_TYPE[self.buffers[buffer].dtype]


Scope = ScopeOf[Value]


# Answers for loads of what the kernel itself makes; None: read memory.
Resolver = Callable[[Expr], "Value | Expr | None"]

# The forms of min and max for a limit that is not NaN.
_LIMITS = {"min": "pf::low", "max": "pf::high"}


def sigmoids_used_once(values: Iterable[Expr]) -> frozenset[Expr]:
    """Those that can be part of the product they are made for."""
    seen: set[Expr] = set()
    uses: Counter[Expr] = Counter()
    for value in values:
        uses[value] += 1
        for e in ex.walk(value, seen):
            uses.update(e.args)
    return frozenset(e for e, count in uses.items() if e.op == "sigmoid" and count == 1)


def _is_wrapped(index: Expr) -> bool:
    """Whether negative positions count from the end: lower/families/indexing.py, `data_index`."""
    return index.op == "where" and index.args[0].op == "lt" and index.args[1].op == "add"


def _is_number(e: Expr) -> bool:
    return e.op == "const" and not math.isnan(e.attr)


class Emitter:
    """Writes the statements of values inside one sweep of a kernel."""

    def __init__(
        self, names: Names, scope: Scope, lane: Atom | None, tail: str | None, resolve: Resolver
    ) -> None:
        self.names = names
        self.scope = scope
        self.lane = lane
        self.tail = tail  # the variable holding the number of live lanes, in a partial vector
        self.resolve = resolve

    # -- values ----------------------------------------------------------------------------

    def value(self, e: Expr) -> Value:
        if e.op == "const":
            return Value(literal(e.attr, e.dtype), e.dtype, False)
        found = self.scope.find(e)
        if found is None:
            for each in post_order(e, self._needed, self._is_known):
                found = self._home(each).known[each] = self._made(each)
        assert found is not None
        return found

    def _is_known(self, e: Expr) -> bool:
        return e.op == "const" or self.scope.find(e) is not None

    def _needed(self, e: Expr) -> Iterable[Expr]:
        """The values that `_made` will ask for, in its order, so that asking does not nest."""
        if e.op not in ("load", "index"):
            return self._function(e)[1]
        answer = self.resolve(e) if e.op == "load" else None
        if answer is not None:
            return (answer,) if isinstance(answer, Expr) else ()
        return (*e.args, *ex.index_values(e))

    def _home(self, e: Expr) -> Scope:
        if e.op == "load" or self._touches_memory(e):
            return self.scope
        return self.scope.home_of(e.variables())

    def _at_home(self, e: Expr) -> Emitter:
        """This emitter, writing where the value belongs."""
        return Emitter(self.names, self._home(e), self.lane, self.tail, self.resolve)

    def _touches_memory(self, e: Expr) -> bool:
        # Loads stay where they are asked for: what a stage stores may be read by the next.
        return e.num_loads > 0

    def _made(self, e: Expr) -> Value:
        if e.op == "load":
            return self._load(e)
        if e.op == "index":
            text, is_vector = self._at_home(e).index(e.attr)
            return self._assign(
                Value(f"int64_t({text})" if not is_vector else text, e.dtype, is_vector), e
            )
        function, operands = self._function(e)
        args = [self.value(a) for a in operands]
        is_vector = any(a.is_vector for a in args)
        spelled = [a.vector if is_vector else a.text for a in args]
        if e.op == "cast":
            text = f"pf::cast<{COMPUTE_TYPE[e.dtype]}>({spelled[0]})"
        elif e.op == "round_to":
            text = f"pf::round_to<{STORAGE_TYPE[e.attr]}>({spelled[0]})"
        elif e.op == "divisor":
            self.names.needs_status = True
            last = f", {self.tail or 'pf::lanes'}" if is_vector else ""
            text = f"pf::divisor({spelled[0]}, status{last})"
        elif e.op in ("rand_f32", "randn_f32", "randint64"):
            text = self._random(e, args)
            is_vector = args[1].is_vector
        elif e.op in _LIMITS and e.dtype.is_float and any(_is_number(a) for a in e.args):
            # One instruction that gives its second operand where either is NaN.
            limit, other = spelled if _is_number(e.args[0]) else reversed(spelled)
            text = f"{_LIMITS[e.op]}({limit}, {other})"
        else:
            text = f"{function}({', '.join(spelled)})"
        return self._assign(Value(text, e.dtype, is_vector), e)

    def _function(self, e: Expr) -> tuple[str, tuple[Expr, ...]]:
        """What is called, and with what: a * sigmoid(x) is one function, which divides a, not 1."""
        for a, s in (e.args, e.args[::-1]) if e.op == "mul" else ():
            # A sigmoid that a whole row shares is better multiplied with than divided by.
            if s in self.names.used_once and s.variables() >= a.variables():
                return "pf::times_sigmoid", (a, s.args[0])
        return SPELLING.get(e.op, e.op), e.args

    def _random(self, e: Expr, args: list[Value]) -> str:
        """The seed is one number for all lanes; so are the bounds of randint."""
        place = e.args[1]
        if e.op == "rand_f32" and place.op == "index" and self._stride(place.attr) == 1:
            # Neighbours share what is drawn: a quarter of the work.
            return f"{SPELLING[e.op]}_row({args[0].text}, {self._base(place.attr)})"
        return f"{SPELLING[e.op]}({', '.join(a.text for a in args)})"

    def _assign(self, value: Value, e: Expr) -> Value:
        name = self.names.local()
        self._home(e).writer.line(f"const auto {name} = {value.text};")
        return Value(name, value.dtype, value.is_vector)

    # -- indices ---------------------------------------------------------------------------

    def index(self, index: Dim) -> tuple[str, bool]:
        """(text, is_vector) of an index; a vector when it varies along the lanes."""
        if self.lane is not None and self._varies(index):
            return self._vector_index(index), True
        return ix.render(index, self.atom), False

    def _varies(self, index: Dim) -> bool:
        if self.lane is None:
            return False
        return self.lane in ex.index_variables(index)

    def atom(self, atom: Atom) -> str:
        if atom.kind == "var":
            return str(atom.parts[0])
        if atom.kind == "sym":
            return self.names.symbol(atom.parts[0])
        if atom.kind == "value":
            return self._checked(atom).text
        numerator, divisor = atom.parts
        a, b = ix.render(numerator, self.atom), ix.render(divisor, self.atom)
        low, _ = ix.bounds(numerator)
        if ix.is_nonnegative(low):
            return f"(({a}) {'/' if atom.kind == 'div' else '%'} ({b}))"
        name = "floordiv" if atom.kind == "div" else "mod"
        return f"pf::{name}(int64_t({a}), int64_t({b}))"

    def _checked(self, atom: Atom) -> Value:
        """An index read from data, verified to lie inside."""
        value, size = atom.parts
        marker = ex.apply("fma", *[ex.cast(value, DType.I64)] * 3)  # a key no formula produces
        found = self.scope.find(marker)
        if found is not None:
            return found
        self.names.needs_status = True
        source = self.value(ex.cast(value, DType.I64))
        size_text = ix.render(size, self.atom)
        limit = f"{size_text}, {size_text if _is_wrapped(value) else 0}"
        if source.is_vector:
            lanes = self.tail or "pf::lanes"
            text = f"pf::checked_n({source.text}, {limit}, status, {lanes})"
        else:
            text = f"pf::checked({source.text}, {limit}, status)"
        name = self.names.local()
        self.scope.writer.line(f"const auto {name} = {text};")
        made = Value(name, DType.I64, source.is_vector)
        self.scope.known[marker] = made
        return made

    def _vector_index(self, index: Dim) -> str:
        if isinstance(index, int) or not self._varies(index):
            return f"pf::splat(int64_t({ix.render(index, self.atom)}))"
        found = self.scope.known_indices.get(index)
        if found is not None:
            return found
        pieces = []
        for monomial, coefficient in index.terms:
            factors = [self._vector_atom(a) for a in monomial]
            if coefficient != 1:
                factors.append(f"int64_t({coefficient})")
            pieces.append(" * ".join(factors))
        if index.const:
            pieces.append(f"int64_t({index.const})")
        name = self.names.local()
        self.scope.writer.line(f"const pf::vec<int64_t> {name} = {' + '.join(pieces)};")
        self.scope.known_indices[index] = name
        return name

    def _vector_atom(self, atom: Atom) -> str:
        if atom is self.lane:
            return f"pf::iota<int64_t>({atom.parts[0]})"
        if atom.kind == "value":
            return self._checked(atom).vector
        if atom.kind in ("div", "mod") and any(self._varies(p) for p in atom.parts):
            a, b = (self._vector_index(p) for p in atom.parts)
            return f"pf::{'floordiv' if atom.kind == 'div' else 'mod'}({a}, {b})"
        return f"int64_t({self.atom(atom)})"

    # -- memory ----------------------------------------------------------------------------

    def _load(self, e: Expr) -> Value:
        answer = self.resolve(e)
        if isinstance(answer, Value):
            return answer
        if isinstance(answer, Expr):
            made = self.value(answer)
            # What goes through memory is narrowed to the buffer's type; only bool and ints differ.
            if made.dtype is not e.dtype:
                made = self._assign(
                    Value(
                        f"pf::cast<{COMPUTE_TYPE[e.dtype]}>({made.text})", e.dtype, made.is_vector
                    ),
                    e,
                )
            return made
        return self.read(e)

    def read(self, e: Expr) -> Value:
        """A load from memory, in the cheapest form its index allows."""
        buffer, index = e.attr
        pointer, kind = self.names.argument(buffer), self.names.storage(buffer)
        mask = self.value(e.args[0]) if e.args else None
        stride = self._stride(index)
        if stride == 0 and (mask is None or not mask.is_vector):
            at = ix.render(index, self.atom)
            text = f"pf::load1<{kind}>({pointer} + {at})"
            if mask is not None:
                text = f"({mask.text} ? {text} : {self.value(e.args[1]).text})"
            return self.named(Value(text, e.dtype, False))
        if mask is not None:
            return self.named(self._masked_load(e, pointer, kind, mask, stride))
        tail = "" if self.tail is None else f", {self.tail}"
        suffix = "" if self.tail is None else "_n"
        if stride == 1:
            text = f"pf::loadv{suffix}<{kind}>({pointer} + {self._base(index)}{tail})"
        elif stride is not None:
            step = ix.render(stride, self.atom)
            text = (
                f"pf::load_strided{suffix}<{kind}>({pointer} + {self._base(index)}, {step}{tail})"
            )
        else:
            text = f"pf::gather{suffix}<{kind}>({pointer}, {self._vector_index(index)}{tail})"
        return self.named(Value(text, e.dtype, True))

    def _masked_load(
        self, e: Expr, pointer: str, kind: str, mask: Value, stride: Dim | None
    ) -> Value:
        index = e.attr[1]
        fill = self.value(e.args[1])
        zero = literal(0, e.dtype)
        live = mask.vector
        if self.tail is not None:
            live = f"pf::land({live}, pf::first_lanes({self.tail}))"
        scalar_fill = zero if fill.is_vector else fill.text
        if stride == 1:
            text = f"pf::load_mask<{kind}>({pointer} + {self._base(index)}, {live}, {scalar_fill})"
        else:
            at = (
                self._vector_index(index)
                if self._varies(index)
                else (f"pf::splat(int64_t({ix.render(index, self.atom)}))")
            )
            text = f"pf::gather_mask<{kind}>({pointer}, {at}, {live}, {scalar_fill})"
        if fill.is_vector:
            text = f"pf::where({mask.vector}, {text}, {fill.text})"
        return Value(text, e.dtype, True)

    def named(self, value: Value) -> Value:
        """The value in a variable of this scope."""
        name = self.names.local()
        self.line(f"const auto {name} = {value.text};")
        return Value(name, value.dtype, value.is_vector)

    def converted(self, value: Value, dtype: DType) -> Value:
        """The value in another compute type."""
        if value.dtype is dtype:
            return value
        return self.named(
            Value(f"pf::cast<{COMPUTE_TYPE[dtype]}>({value.text})", dtype, value.is_vector)
        )

    def line(self, text: str) -> None:
        self.scope.writer.line(text)

    def update(self, place: str, kind: str, combine: str, value: Value) -> None:
        """Combine a value into what lies at a contiguous place in memory."""
        if self.lane is None:
            held = f"{combine}(pf::load1<{kind}>({place}), {value.text})"
            self.line(f"pf::store1<{kind}>({place}, {held});")
        elif self.tail is None:
            held = f"{combine}(pf::loadv<{kind}>({place}), {value.vector})"
            self.line(f"pf::storev<{kind}>({place}, {held});")
        else:
            held = f"{combine}(pf::loadv_n<{kind}>({place}, {self.tail}), {value.vector})"
            self.line(f"pf::storev_n<{kind}>({place}, {held}, {self.tail});")

    def _stride(self, index: Dim) -> Dim | None:
        if self.lane is None:
            return 0
        return ix.coefficient_of(index, self.lane)

    def _base(self, index: Dim) -> str:
        """The index at the first lane: the lane variable holds that position."""
        return ix.render(index, self.atom)

    def store(self, buffer: str, index: Dim, value: Value, *, stream: bool = False) -> None:
        pointer, kind = self.names.target(buffer), self.names.storage(buffer)
        stride = self._stride(index)
        line = self.scope.writer.line
        if stride == 0:
            at = ix.render(index, self.atom)
            line(f"pf::store1<{kind}>({pointer} + {at}, {value.text});")
            return
        tail = "" if self.tail is None else f", {self.tail}"
        suffix = "" if self.tail is None else "_n"
        if stride == 1:
            name = "streamv" if stream and self.tail is None else f"storev{suffix}"
            line(f"pf::{name}<{kind}>({pointer} + {self._base(index)}, {value.vector}{tail});")
        elif stride is not None:
            step = ix.render(stride, self.atom)
            line(
                f"pf::store_strided{suffix}<{kind}>({pointer} + {self._base(index)}, {step}, "
                f"{value.vector}{tail});"
            )
        else:
            at = self._vector_index(index)
            line(f"pf::scatter{suffix}<{kind}>({pointer}, {at}, {value.vector}{tail});")
