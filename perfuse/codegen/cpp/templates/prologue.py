"""The right operand of a contraction, computed where the template needs it, as a lambda.

The template asks for some columns, from one row to another: contiguous elements of the loop that
would store the operand, whose axes they are counted along.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfuse.codegen.cpp.emit import Emitter, Resolver, Scope
from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.writer import Writer
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom
from perfuse.ir.expr import Expr, loads_of, substitute
from perfuse.ir.index import Dim
from perfuse.ir.program import Axis, Loop

_FILL = (
    "const auto fill = [=](auto native, {kind}* to, int64_t ld, int64_t top, int64_t deep, "
    "int64_t first, int64_t wide) PF_INLINED {{"
)


def write_prologue(w: Writer, frame: CppFrame, loop: Loop, depth: str, kind: str) -> str:
    """Write the lambda that computes an operand of `depth` rows, and return the operand's type.

    `kind` is the type of its elements.
    """
    columns = "for (int64_t column = 0; column < wide; ++column) {"
    with w.block(_FILL.format(kind=kind), "};"), w.block(columns):
        w.line(f"const int64_t start = (first + column) * int64_t({depth}) + top;")
        _write_elements(w, frame, loop, depth, kind)
    return f"pf::Computed<{kind}, decltype(fill)>"


def _write_elements(w: Writer, frame: CppFrame, loop: Loop, depth: str, kind: str) -> None:
    """The elements of a column: lanes along the last axis, to its end or the column's.

    Over a last axis of two, as the halves of bytes, lanes run along the axis before it. What the
    next columns are computed from is fetched meanwhile.
    """
    axes = [axis for axis in loop.axes if axis.atom is not None]
    pair = axes.pop() if len(axes) > 1 and axes[-1].size == 2 else None
    *outer, last = axes
    size, step = f"int64_t({frame.dim(last.size)})", 1 if pair is None else 2
    with w.block("for (int64_t done = 0; done < deep;) {"):
        w.line(f"const int64_t begin = (start + done) / {step} % {size};")
        w.line(f"const int64_t end = pf::least(begin + (deep - done) / {step}, {size});")
        place_axes(w, frame, f"(start + done) / ({step} * {size})", outer)
        w.line(f"const int64_t ahead = wide * int64_t({depth}) / {step};")
        w.line(f"{kind}* const at = to + column * ld + done - {step} * begin;")
        scope = Scope(w, frozenset(a.atom for a in outer if a.atom), None)
        _Lanes(frame, loop, last, pair, kind).write(scope)
        w.line(f"done += {step} * (end - begin);")


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The vectors of one row of the operand's loop, along `axis`, and of both places of a pair."""

    frame: CppFrame
    loop: Loop
    axis: Axis
    pair: Axis | None
    kind: str

    def write(self, scope: Scope) -> None:
        assert self.axis.atom is not None
        name, lanes = self.axis.name, self.frame.lanes
        known, body = frozenset({self.axis.atom}), scope.writer.child()
        # What all vectors share is written before the loop.
        body.line(f"int64_t at_{name} = begin;")
        body.line("#pragma GCC unroll 4")
        with body.block(f"for (; at_{name} + {lanes} <= end; at_{name} += {lanes}) {{"):
            body.line(f"const int64_t {name} = at_{name};")
            values = self._values(Scope(body, known, scope), None)
            for place in self._fetched():
                body.line(f"__builtin_prefetch({place} + ahead);")
            call = "put" if self.pair is None else "put_pairs"
            body.line(f"pf::{call}<native.value, {self.kind}>({self._target(values)});")
        with body.block(f"if (at_{name} < end) {{"):
            body.line(f"const int64_t {name} = at_{name};")
            body.line(f"const int live = (int)(end - {name});")
            values = self._values(Scope(body, known, scope), "live")
            call = "storev_n" if self.pair is None else "put_pairs_n"
            body.line(f"pf::{call}<{self.kind}>({self._target(values)}, live);")
        scope.writer.take(body)

    def _target(self, values: list[str]) -> str:
        return ", ".join([f"at + {len(values)} * {self.axis.name}", *values])

    def _values(self, scope: Scope, tail: str | None) -> list[str]:
        """A vector of values, or one for each place of a pair."""
        emitter = _Hoisting(self.frame.names, scope, self.axis.atom, tail, lambda load: None)
        dtype = self.frame.buffers[self.loop.out].dtype.compute
        made = []
        for value in self._in_pair(self.loop.value):
            made.append(emitter.converted(emitter.value(value), dtype).vector)
        return made

    def _in_pair(self, value: Expr) -> list[Expr]:
        if self.pair is None or self.pair.atom is None:
            return [value]
        return [substitute(value, {self.pair.atom: place}) for place in range(2)]

    def _fetched(self) -> list[str]:
        """Where it reads what the same number of columns is computed from for each vector."""
        first: dict[Atom, Dim] = {}
        if self.pair is not None and self.pair.atom is not None:
            first = {self.pair.atom: 0}
        stored = ix.substitute(self.loop.index, first, lambda value: value)
        reads = [read for value in self._in_pair(self.loop.value) for read in loads_of(value)]
        step = 1 if self.pair is None else 2
        along = dict.fromkeys(r for r in reads if ix.mul(r.index, step) is stored)
        argument, dim = self.frame.names.argument, self.frame.dim
        return [f"{argument(read.buffer)} + {dim(read.index)}" for read in along]


class _Hoisting(Emitter):
    """An emitter of loads that nothing in the kernel overwrites: scales are read once a group."""

    def at(self, scope: Scope, resolve: Resolver) -> _Hoisting:
        return _Hoisting(self.names, scope, self.lane, self.tail, resolve)

    def stays(self, e: Expr) -> bool:
        return False


def place_axes(w: Writer, frame: CppFrame, flat: str, axes: list[Axis]) -> None:
    """The variables of axes whose steps are counted together."""
    for number in reversed(range(1, len(axes))):
        size, rest = frame.dim(axes[number].size), f"rest_{axes[number].name}"
        w.line(f"const int64_t {axes[number].name} = ({flat}) % ({size});")
        w.line(f"const int64_t {rest} = ({flat}) / ({size});")
        flat = rest
    if axes:
        w.line(f"const int64_t {axes[0].name} = {flat};")
