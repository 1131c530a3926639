"""Scalar expressions as Triton statements over blocks.

A block has lanes along rows, along columns, or both; a value is as wide as what it depends on, and
Triton broadcasts. What does not change along a loop over columns is written before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from perfuse.codegen.scope import Scope as ScopeOf
from perfuse.codegen.triton.spelling import (
    COMPUTE_TYPE,
    NARROW_TYPE,
    POINTER_TYPE,
    literal,
    quotient,
    spelling,
    typed,
)
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Atom, Dim
from perfuse.ir.post_order import post_order
from perfuse.ir.program import Buffer

ROWS, COLUMNS = 1, 2  # the ways in which a value may vary

_LARGEST = {DType.F8E4M3FN: 448.0, DType.F8E5M2: 57344.0}


@dataclass(frozen=True, slots=True)
class Value:
    """A Triton expression: its text, dtype, and the lanes it varies along."""

    text: str
    dtype: DType
    lanes: int


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs from GPU to GPU in how a value is spelled."""

    native_fp8: frozenset[DType] = frozenset()  # floats of eight bits that it converts itself
    rounds_bf16: bool = True  # whether a conversion to bfloat16 rounds, or cuts
    pipelines_assertions: bool = True  # whether a loop with an assertion may have several stages
    approximates: bool = False  # float32 too is divided by approximation


class Names:
    """Arguments of one kernel, numbered by first use so that equal kernels have equal text."""

    def __init__(
        self, buffers: dict[str, Buffer], written: frozenset[str], dialect: Dialect,
        streamed: frozenset[tuple[str, Dim]] = frozenset(), *, is_rounded: bool = False,
    ) -> None:  # fmt: skip
        self.buffers = buffers
        self.streamed = streamed  # what is read just once, and where: not for the cache to keep
        self.is_rounded = is_rounded  # float32 is computed as eager would, not approximated
        self.written = written
        self.dialect = dialect
        self.arguments: dict[str, str] = {}  # buffer -> a0, a1, ...
        self.symbols: dict[str, str] = {}  # size symbol -> n0, n1, ...
        self.checks_indices = False
        self._num_locals = 0
        self._reads_written: dict[Expr, bool] = {}

    def argument(self, buffer: str) -> str:
        return self.arguments.setdefault(buffer, f"a{len(self.arguments)}")

    def symbol(self, name: str) -> str:
        return self.symbols.setdefault(name, f"n{len(self.symbols)}")

    def local(self) -> str:
        self._num_locals += 1
        return f"t{self._num_locals}"

    def reads_written(self, e: Expr) -> bool:
        """Whether a value is read, in part, from what the kernel itself writes."""
        found = self._reads_written.get(e)
        if found is None:
            found = e.num_loads > 0 and any(load.attr[0] in self.written for load in ex.loads_of(e))
            self._reads_written[e] = found
        return found

    def is_bits(self, dtype: DType) -> bool:
        """Whether a float of eight bits is converted by our own code, from and to its bits."""
        return (
            dtype.is_narrow_float and dtype.num_bytes == 1 and dtype not in self.dialect.native_fp8
        )

    def pointer_type(self, buffer: str) -> str:
        dtype = self.buffers[buffer].dtype
        return "*u8" if self.is_bits(dtype) else POINTER_TYPE[dtype]


Scope = ScopeOf[Value]


@dataclass(frozen=True, slots=True)
class Block:
    """The lanes of a block: which axes vary along which, and the masks of what lies outside."""

    lanes_of: dict[Atom, int]
    masks: dict[int, str]  # ROWS or COLUMNS -> name of its mask, where one is needed
    zeros: dict[int, str]  # lanes -> an integer zero of that shape

    def lanes(self, variables: frozenset[Atom]) -> int:
        found = 0
        for atom in variables:
            found |= self.lanes_of.get(atom, 0)
        return found

    def mask(self, lanes: int) -> str | None:
        parts = [name for bit, name in self.masks.items() if bit & lanes]
        return " & ".join(parts) or None


@dataclass(frozen=True, slots=True)
class Formula:
    """What to compute in place of a load, and how the loads inside it are answered."""

    value: Expr
    resolve: Resolver


# Answers for loads of what the kernel itself makes; None: read memory.
Resolver = Callable[[Expr], "Value | Formula | None"]


class Emitter:
    """Writes the statements of values at one place of a kernel."""

    def __init__(self, names: Names, scope: Scope, block: Block, resolve: Resolver) -> None:
        self.names = names
        self.scope = scope
        self.block = block
        self.resolve = resolve

    # -- values ----------------------------------------------------------------------------

    def value(self, e: Expr) -> Value:
        if e.op == "const":
            return Value(literal(e.attr, e.dtype), e.dtype, 0)
        found = self.scope.find(e)
        if found is None:
            for emitter, each in post_order((self._at(self._home(e)), e), _needed, _is_known):
                found = emitter.scope.known[each] = emitter._made(each)
        assert found is not None
        return found

    def needed(self, e: Expr) -> Iterable[tuple[Emitter, Expr]]:
        """The values that `_made` will ask for, and where, so that asking does not nest."""
        emitter, values = self, e.args
        if e.op in ("load", "index"):
            answer = self.resolve(e) if e.op == "load" else None
            if isinstance(answer, Value):
                return
            if isinstance(answer, Formula):
                emitter = Emitter(self.names, self.scope, self.block, answer.resolve)
                values = (answer.value,)
            else:
                values = (*e.args, *ex.index_values(e))
        for value in values:
            yield emitter._at(emitter._home(value)), value

    def _at(self, scope: Scope) -> Emitter:
        if scope is self.scope:
            return self
        return Emitter(self.names, scope, self.block, self.resolve)

    def _home(self, e: Expr) -> Scope:
        # What the kernel writes is read where it is asked for: it may change in between.
        if self.scope.parent is None or self.names.reads_written(e):
            return self.scope
        return self.scope.home_of(e.variables())

    def _made(self, e: Expr) -> Value:
        if e.op == "load":
            return self._load(e)
        if e.op == "index":
            lanes = self.block.lanes(e.variables())
            return self.named(Value(f"tl.cast({self.index(e.attr)}, tl.int64)", e.dtype, lanes))
        args = [self.value(a) for a in e.args]
        lanes = 0
        for a in args:
            lanes |= a.lanes
        if e.op == "cast":
            text = self._cast(args[0], e.dtype)
        elif e.op == "round_to":
            text = self._rounded(e, args[0].text)
        else:
            texts = [a.text for a in args]
            given = e.args[1:] if e.op == "where" else e.args
            if all(a.op == "const" for a in given):  # no partner gives them their type
                texts[-len(given) :] = [typed(a.attr, a.dtype) for a in given]
            kind = e.args[-1].dtype if e.args else e.dtype
            is_rounded = self.names.is_rounded and not _divides_exactly(e)
            text = spelling(e.op, kind, is_rounded=is_rounded).format(*texts)
        return self.named(Value(text, e.dtype, lanes))

    def _cast(self, value: Value, dtype: DType) -> str:
        if dtype is DType.BOOL:
            return f"({value.text} != 0)"
        return f"tl.cast({value.text}, {COMPUTE_TYPE[dtype]})"

    def _rounded(self, e: Expr, text: str) -> str:
        kind: DType = e.attr
        if kind.num_bytes == 1:
            return self._decoded(self.narrowed(e.args[0], text, kind), kind)
        return f"tl.cast(tl.cast({self._cut(text, kind)}, {NARROW_TYPE[kind]}), tl.float32)"

    def _cut(self, text: str, kind: DType) -> str:
        """A value that converts to bfloat16 as it should, even by cutting."""
        must_round = kind is DType.BF16 and not self.names.dialect.rounds_bf16
        return f"pf_round_bf16(tl.cast({text}, tl.float32))" if must_round else text

    def narrowed(self, e: Expr, text: str, kind: DType) -> str:
        """A float32 value as a float of eight bits (its bits, where the GPU has no such type)."""
        if self.names.is_bits(kind):
            return f"pf_to_{kind}({text})"
        if not _is_bounded(e, _LARGEST.get(kind, 0.0)):
            if kind is not DType.F8E4M3FN:
                return f"pf_to_{kind}({text}).to({NARROW_TYPE[kind]}, bitcast=True)"
            text = f"pf_nan_beyond_464({text})"
        return f"({text}).to({NARROW_TYPE[kind]})"

    def _decoded(self, text: str, kind: DType) -> str:
        if self.names.is_bits(kind):
            return f"pf_from_{kind}({text})"
        return f"({text}).to(tl.float32)"

    def named(self, value: Value) -> Value:
        """The value in a variable of this scope."""
        name = self.names.local()
        self.line(f"{name} = {value.text}")
        return Value(name, value.dtype, value.lanes)

    def converted(self, value: Value, dtype: DType) -> Value:
        """The value in another compute type."""
        if value.dtype is dtype:
            return value
        return self.named(Value(self._cast(value, dtype), dtype, value.lanes))

    def line(self, text: str) -> None:
        self.scope.writer.line(text)

    # -- indices ---------------------------------------------------------------------------

    def index(self, index: Dim) -> str:
        return ix.render(index, self.atom)

    def atom(self, atom: Atom) -> str:
        if atom.kind == "var":
            return str(atom.parts[0])
        if atom.kind == "sym":
            return self.names.symbol(atom.parts[0])
        if atom.kind == "value":
            return self._checked(atom)
        return quotient(atom, self.index(atom.parts[0]), self.index(atom.parts[1]))

    def _checked(self, atom: Atom) -> str:
        """An index read from data, asserted to lie inside."""
        value, size = atom.parts
        marker = ex.apply("fma", *[ex.cast(value, DType.I64)] * 3)  # a key no formula produces
        found = self.scope.find(marker)
        if found is None:
            self.names.checks_indices = True
            source = self.value(ex.cast(value, DType.I64))
            inside = f"({source.text} >= 0) & ({source.text} < {self.index(size)})"
            mask = self.block.mask(source.lanes)
            if mask is not None:
                inside = f"({inside}) | (({mask}) == 0)"
            self.line(f"tl.device_assert({inside}, 'index out of range')")
            found = self.scope.known[marker] = source
        return found.text

    # -- memory ----------------------------------------------------------------------------

    def _load(self, e: Expr) -> Value:
        answer = self.resolve(e)
        if isinstance(answer, Value):
            return answer
        if isinstance(answer, Formula):
            inner = Emitter(self.names, self.scope, self.block, answer.resolve)
            return self.converted(inner.value(answer.value), e.dtype)
        return self.read(e)

    def place(self, buffer: str, index: Dim, lanes: int) -> tuple[str, int]:
        """(address of an element, its lanes), at least as wide as asked for."""
        at, own = self.index(index), self.block.lanes(ex.index_variables(index))
        missing = lanes & ~own
        if missing:
            at = f"{at} + {self.block.zeros[missing]}"
        pointer = self.names.argument(buffer)
        return (f"{pointer} + ({at})" if at != "0" else pointer), own | lanes

    def read(self, e: Expr) -> Value:
        """A load from memory, of the lanes that are inside."""
        buffer, index = e.attr
        condition = self.value(e.args[0]) if e.args else None
        address, lanes = self.place(buffer, index, condition.lanes if condition else 0)
        masks = [m for m in (self.block.mask(lanes),) if m is not None]
        other = ""
        fill: Value | None = None
        if condition is not None:
            masks.append(condition.text)
            fill = self.value(e.args[1])
            if e.args[1].op == "const" and not self._is_small(buffer):
                other = f", other={_plain(e.args[1].attr)}"
        elif masks:
            other = ", other=0" if not self._is_small(buffer) else ""
        mask = f", {' & '.join(masks)}" if masks else ""
        once = ", eviction_policy='evict_first'" if e.attr in self.names.streamed else ""
        text = self._widened(f"tl.load({address}{mask}{other}{once})", buffer)
        value = self.named(Value(text, e.dtype, lanes))
        if fill is None or condition is None or (other and e.args[1].op == "const"):
            return value
        chosen = f"tl.where({condition.text}, {value.text}, {fill.text})"
        return self.named(Value(chosen, e.dtype, lanes | fill.lanes))

    def _is_small(self, buffer: str) -> bool:
        dtype = self.names.buffers[buffer].dtype
        return dtype.is_narrow_float and dtype.num_bytes == 1

    def _widened(self, text: str, buffer: str) -> str:
        dtype = self.names.buffers[buffer].dtype
        if not dtype.is_narrow_float:
            return text
        return self._decoded(text, dtype) if dtype.num_bytes == 1 else f"{text}.to(tl.float32)"

    def store(self, buffer: str, index: Dim, value: Value, source: Expr | None = None) -> None:
        """Store a value of the buffer's compute type; `source` is the formula it came from."""
        address, lanes = self.place(buffer, index, value.lanes)
        mask = self.block.mask(lanes)
        dtype = self.names.buffers[buffer].dtype
        text = self._cut(value.text, dtype)
        if dtype.is_narrow_float and dtype.num_bytes == 1:
            formula = source if source is not None else ex.const(0.0, DType.F32)
            text = self.narrowed(formula, text if value.lanes else f"({text} + 0.0)", dtype)
        self.line(f"tl.store({address}, {text}{'' if mask is None else f', {mask}'})")


def _needed(place: tuple[Emitter, Expr]) -> Iterable[tuple[Emitter, Expr]]:
    emitter, value = place
    return emitter.needed(value)


def _is_known(place: tuple[Emitter, Expr]) -> bool:
    emitter, value = place
    return value.op == "const" or emitter.scope.find(value) is not None


def _plain(value: bool | int | float) -> str:
    if isinstance(value, float):
        return literal(value, DType.F32)
    return str(int(value))


def _is_bounded(e: Expr, limit: float) -> bool:
    """Whether a formula was clamped to lie within plus and minus a limit."""
    while e.op in ("round_to", "cast") and e.args[0].dtype.is_float:
        e = e.args[0]
    if e.op not in ("min", "max"):
        return False
    inner = [a for a in e.args if a.op != "const"]
    if len(inner) != 1 or not any(a.op == "const" and abs(a.attr) <= limit for a in e.args):
        return False
    below = inner[0]
    while below.op in ("round_to", "cast") and below.args[0].dtype.is_float:
        below = below.args[0]
    return (
        below.op in ("min", "max")
        and below.op != e.op
        and any(a.op == "const" and abs(a.attr) <= limit for a in below.args)
    )


def _divides_exactly(e: Expr) -> bool:
    """Whether a quotient is a product: by a power of two."""
    divisor = e.args[-1] if e.op == "div" else None
    if divisor is None or divisor.op != "const":
        return False
    return math.frexp(abs(float(divisor.attr)))[0] == 0.5
