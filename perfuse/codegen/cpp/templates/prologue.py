"""The right operand of a contraction, computed where the template needs it, as a lambda.

The template asks for some columns, from one row to another: contiguous elements of the loop that
would store the operand, whose axes they are counted along.
"""

from __future__ import annotations

from perfuse.codegen.cpp.emit import Emitter, Resolver, Scope
from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.writer import Writer
from perfuse.ir.expr import Expr
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

    What the next columns are computed from is fetched meanwhile.
    """
    *outer, last = [axis for axis in loop.axes if axis.atom is not None]
    size = f"int64_t({frame.dim(last.size)})"
    with w.block("for (int64_t done = 0; done < deep;) {"):
        w.line(f"const int64_t begin = (start + done) % {size};")
        w.line(f"const int64_t end = pf::least(begin + deep - done, {size});")
        place_axes(w, frame, f"(start + done) / {size}", outer)
        w.line(f"const int64_t ahead = start + done - begin + wide * int64_t({depth});")
        w.line(f"{kind}* const at = to + column * ld + done - begin;")
        scope = Scope(w, frozenset(a.atom for a in outer if a.atom), None)
        _write_lanes(frame, loop, scope, last, kind)
        w.line("done += end - begin;")


def _write_lanes(frame: CppFrame, loop: Loop, scope: Scope, axis: Axis, kind: str) -> None:
    assert axis.atom is not None
    name, lanes = axis.name, frame.lanes
    known, body = (
        frozenset({axis.atom}),
        scope.writer.child(),
    )  # what all vectors share is written before it
    body.line(f"int64_t at_{name} = begin;")
    body.line("#pragma GCC unroll 4")
    with body.block(f"for (; at_{name} + {lanes} <= end; at_{name} += {lanes}) {{"):
        body.line(f"const int64_t {name} = at_{name};")
        value = _value(frame, loop, Scope(body, known, scope), None)
        for source in dict.fromkeys(r.buffer for r in loop.reads() if r.index is loop.index):
            body.line(f"__builtin_prefetch({frame.names.argument(source)} + ahead + {name});")
        body.line(f"pf::put<native.value, {kind}>(at + {name}, {value});")
    with body.block(f"if (at_{name} < end) {{"):
        body.line(f"const int64_t {name} = at_{name};")
        body.line(f"const int live = (int)(end - {name});")
        value = _value(frame, loop, Scope(body, known, scope), "live")
        body.line(f"pf::storev_n<{kind}>(at + {name}, {value}, live);")
    scope.writer.take(body)


class _Hoisting(Emitter):
    """An emitter of loads that nothing in the kernel overwrites: scales are read once a group."""

    def at(self, scope: Scope, resolve: Resolver) -> _Hoisting:
        return _Hoisting(self.names, scope, self.lane, self.tail, resolve)

    def stays(self, e: Expr) -> bool:
        return False


def _value(frame: CppFrame, loop: Loop, scope: Scope, tail: str | None) -> str:
    """The value of one vector; the innermost axis of the loop is that of the lanes."""
    lane = [axis.atom for axis in loop.axes if axis.atom is not None][-1]
    emitter = _Hoisting(frame.names, scope, lane, tail, lambda load: None)
    value = emitter.value(loop.value)
    return emitter.converted(value, frame.buffers[loop.out].dtype.compute).vector


def place_axes(w: Writer, frame: CppFrame, flat: str, axes: list[Axis]) -> None:
    """The variables of axes whose steps are counted together."""
    for number in reversed(range(1, len(axes))):
        size, rest = frame.dim(axes[number].size), f"rest_{axes[number].name}"
        w.line(f"const int64_t {axes[number].name} = ({flat}) % ({size});")
        w.line(f"const int64_t {rest} = ({flat}) / ({size});")
        flat = rest
    if axes:
        w.line(f"const int64_t {axes[0].name} = {flat};")
