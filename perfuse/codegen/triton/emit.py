"""Scalar expressions as Triton statements over blocks.

A block has lanes along rows, along columns, or both; a value is as wide as what it depends on, and
Triton broadcasts. What does not change along a loop over columns is written before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from perfuse.codegen import emitter
from perfuse.codegen.emitter import Value
from perfuse.codegen.triton.helpers import SIGNED_NAN
from perfuse.codegen.triton.spelling import (
    COMPUTE_TYPE,
    NARROW_TYPE,
    POINTER_TYPE,
    literal,
    spelling,
    typed,
)
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Division, Quotient
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer

ROWS, COLUMNS = 1, 2  # the ways in which a value may vary

_LARGEST = {DType.F8E4M3FN: 448.0, DType.F8E5M2: 57344.0}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Differences between GPUs in the code for a value."""

    native_fp8: frozenset[DType] = frozenset()  # FP8 types that it converts in hardware
    rounds_bf16: bool = True  # whether a conversion to bfloat16 rounds, or truncates
    pipelines_assertions: bool = True  # whether a loop with an assertion may have several stages
    maps_on_host: bool = False  # whether the launcher makes tensor maps
    approximates: bool = False  # float32 too is divided by approximation
    is_exact: bool = False  # nothing is approximated, whatever the kernel moves


class Names(emitter.Names):
    """Arguments of one Triton kernel."""

    def __init__(
        self, buffers: Mapping[str, Buffer], written: frozenset[str], dialect: Dialect,
        streamed: frozenset[tuple[str, Dim]] = frozenset(), *, is_rounded: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(buffers)
        self.streamed = streamed  # what is read just once, and where: not to be kept in the cache
        self.is_rounded = is_rounded  # float32 is computed as eager would, not approximated
        self.is_brief = False  # float32 that is not rounded: with as few instructions as possible
        self.written = written
        self.dialect = dialect
        self.checks_indices = False
        self._reads_written: dict[Expr, bool] = {}

    def reads_written(self, e: Expr) -> bool:
        """Whether a value is read, in part, from what the kernel itself writes."""
        found = self._reads_written.get(e)
        if found is None:
            found = e.num_loads > 0 and any(load.buffer in self.written for load in ex.loads_of(e))
            self._reads_written[e] = found
        return found

    def is_bits(self, dtype: DType) -> bool:
        """Whether an FP8 value is converted in software, from and to its bits."""
        return dtype.is_float8 and dtype not in self.dialect.native_fp8

    def pointer_type(self, buffer: str) -> str:
        dtype = self.buffers[buffer].dtype
        return "*u8" if self.is_bits(dtype) else POINTER_TYPE[dtype]

    def quotient(self, atom: Division, numerator: str, divisor: str) -> str:
        # Triton's own round towards zero, an index's down.
        is_quotient = isinstance(atom, Quotient)
        if ix.is_nonnegative(ix.bounds(atom.numerator)[0]):
            return f"(({numerator}) {'//' if is_quotient else '%'} ({divisor}))"
        return f"{'pf_floordiv' if is_quotient else 'pf_mod'}({numerator}, {divisor})"


Scope = emitter.Scope[Value]
Resolver = emitter.Resolver[Value]


@dataclass(frozen=True, slots=True)
class Block:
    """The lanes of a block: which axes vary along which, and the masks of what is out of bounds."""

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


class Emitter(emitter.Emitter[Names, Value]):
    """Writes the statements of values at one place of a kernel."""

    def __init__(self, names: Names, scope: Scope, block: Block, resolve: Resolver) -> None:
        super().__init__(names, scope, resolve)
        self.block = block

    def at(self, scope: Scope, resolve: Resolver) -> Emitter:
        return Emitter(self.names, scope, self.block, resolve)

    def stays(self, e: Expr) -> bool:
        # What the kernel writes is read where it is used: it may change in between.
        return self.names.reads_written(e)

    def assignment(self, name: str, text: str) -> str:
        return f"{name} = {text}"

    # -- values ----------------------------------------------------------------------------

    def constant(self, e: Expr) -> Value:
        return Value(literal(e.attr, e.dtype), e.dtype, 0)

    def position(self, e: Expr) -> Value:
        lanes = self.block.lanes(e.variables())
        return Value(f"tl.cast({self.index(e.attr)}, tl.int64)", e.dtype, lanes)

    def computed(self, e: Expr, args: list[Value]) -> Value:
        lanes = 0
        for a in args:
            lanes |= a.lanes
        if e.op == "cast":
            text = self.cast(args[0], e.dtype)
        elif e.op == "round_to":
            text = self._rounded(e, args[0].text)
        else:
            texts = [a.text for a in args]
            given = e.args[1:] if e.op == "where" else e.args
            if all(a.op == "const" for a in given):  # no partner gives them their type
                texts[-len(given) :] = [typed(a.attr, a.dtype) for a in given]
            kind = e.args[-1].dtype if e.args else e.dtype
            is_rounded = self.names.is_rounded and not _divides_exactly(e)
            how = spelling(e.op, kind, is_rounded=is_rounded, is_brief=self.names.is_brief)
            text = how.format(*texts)
        return Value(text, e.dtype, lanes)

    def cast(self, value: Value, dtype: DType) -> str:
        if dtype is DType.BOOL:
            return f"({value.text} != 0)"
        return f"tl.cast({value.text}, {COMPUTE_TYPE[dtype]})"

    def _rounded(self, e: Expr, text: str) -> str:
        kind: DType = e.attr
        if kind.num_bytes == 1:
            inner = e.args[0]
            whole = typed(inner.attr, DType.F32) if inner.op == "const" else text
            return self._decoded(self.narrowed(inner, whole, kind), kind)
        return f"tl.cast(tl.cast({self._cut(text, kind)}, {NARROW_TYPE[kind]}), tl.float32)"

    def _cut(self, text: str, kind: DType) -> str:
        """A value that converts to bfloat16 correctly, even by truncation."""
        must_round = kind is DType.BF16 and not self.names.dialect.rounds_bf16
        return f"pf_round_bf16(tl.cast({text}, tl.float32))" if must_round else text

    def narrowed(self, e: Expr, text: str, kind: DType) -> str:
        """A float32 value as FP8 (its bits, if the GPU has no such type)."""
        if self.names.is_bits(kind):
            return f"pf_to_{kind}({text})"
        if not _is_bounded(e, _LARGEST.get(kind, 0.0)):
            return f"pf_near_{kind}({text}).to({NARROW_TYPE[kind]}, bitcast=True)"
        return f"({text}).to({NARROW_TYPE[kind]})"

    def _decoded(self, text: str, kind: DType) -> str:
        if self.names.is_bits(kind):
            return f"pf_from_{kind}({text})"
        if kind in SIGNED_NAN:
            return f"pf_wide_{kind}({text})"
        return f"({text}).to(tl.float32)"

    # -- memory ----------------------------------------------------------------------------

    def check(self, source: Value, value: Expr, size: Dim) -> Value:
        self.names.checks_indices = True
        inside = f"({source.text} >= 0) & ({source.text} < {self.index(size)})"
        mask = self.block.mask(source.lanes)
        if mask is not None:
            inside = f"({inside}) | (({mask}) == 0)"
        self.line(f"tl.device_assert({inside}, 'index out of range')")
        return source

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
        return self.names.buffers[buffer].dtype.is_float8

    def _widened(self, text: str, buffer: str) -> str:
        dtype = self.names.buffers[buffer].dtype
        if not dtype.is_narrow_float:
            return text
        return self._decoded(text, dtype) if dtype.num_bytes == 1 else f"{text}.to(tl.float32)"

    def store(self, buffer: str, index: Dim, value: Value, source: Expr | None = None) -> None:
        """Store a value of the buffer's compute type; `source` is the formula it came from."""
        address, lanes = self.place(buffer, index, value.lanes)
        mask = self.block.mask(lanes)
        text = self._for_memory(buffer, value, source)
        self.line(f"tl.store({address}, {text}{'' if mask is None else f', {mask}'})")

    def _for_memory(self, buffer: str, value: Value, source: Expr | None) -> str:
        """A value that a store converts to the buffer's dtype as it should."""
        dtype = self.names.buffers[buffer].dtype
        text = self._cut(value.text, dtype)
        if dtype.is_float8:
            formula = source if source is not None else ex.const(0.0, DType.F32)
            # A literal and a number in a register are not tensors yet.
            is_number = not value.lanes or (source is not None and source.op == "const")
            whole = f"tl.cast({text}, tl.float32)" if is_number else text
            text = self.narrowed(formula, whole, dtype)
        return text

    def narrow_text(self, buffer: str, value: Value, source: Expr | None) -> str:
        """A value in the dtype of the buffer, for stores that do not convert."""
        dtype, text = self.names.buffers[buffer].dtype, self._for_memory(buffer, value, source)
        if self.names.is_bits(dtype):
            return text
        return f"tl.cast({text}, {NARROW_TYPE.get(dtype) or COMPUTE_TYPE[dtype]})"


def _plain(value: bool | int | float) -> str:
    return literal(value, DType.F32) if isinstance(value, float) else str(int(value))


def _is_bounded(e: Expr, limit: float) -> bool:
    """Whether a formula was clamped to plus and minus a limit."""
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
    if e.op != "div" or e.args[-1].op != "const":
        return False
    return math.frexp(abs(float(e.args[-1].attr)))[0] == 0.5
