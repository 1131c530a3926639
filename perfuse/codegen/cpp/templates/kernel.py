"""One contraction as one C++ function: the call of a template, and its epilogue as a lambda.

The template hands over finished blocks of sums. The epilogue runs over their rows and columns as
any kernel of loops does; where it reads the result of the matmul, it reads the block.
"""

from __future__ import annotations

from collections.abc import Mapping

from perfuse.codegen.cpp.emit import Emitter, Resolver, Scope, Value
from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.cpp.kernel import KernelText, parameters_of
from perfuse.codegen.cpp.templates.choices import CppTemplate, CppTemplateKind
from perfuse.codegen.cpp.templates.prologue import place_axes, write_prologue
from perfuse.codegen.emitter import Formula
from perfuse.codegen.writer import Writer
from perfuse.context import Context
from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.program import Buffer, BufferKind, View
from perfuse.schedule.contract import depth_of, place_of, result_value, sizes_of
from perfuse.schedule.plan import Kernel

# Loads of this name are the sums of a block.
_SUMS = "sums"
# Multiplications and additions that are worth a second thread, for each element of cpu.grain.
_WORK_PER_ELEMENT = 8
_FINISH = (
    "const auto finish = [=](const float* block, int64_t ld, int64_t top, int64_t first, "
    "int64_t rows, int64_t columns) PF_INLINED {"
)


def generate_contraction(
    kernel: Kernel,
    template: CppTemplate,
    buffers: Mapping[str, Buffer],
    context: Context,
    over: Mapping[str, str],
) -> KernelText:
    """Write a kernel with a contraction, computed by this template."""
    frame = CppFrame(kernel, buffers, context, frozenset(), over)
    assert kernel.contraction is not None
    (matmul,) = kernel.contraction.matmuls
    rows, columns, depth = (frame.dim(size) for size in (*sizes_of(matmul), depth_of(matmul)))
    w = Writer(1)
    left, right, prologue = matmul.operands.a, matmul.operands.b, kernel.contraction.prologue
    w.line(f"const {_matrix(frame, left)} left = {_place(frame, left)};")
    if prologue is None:
        w.line(f"const {_matrix(frame, right)} right = {_place(frame, right)};")
    else:
        kind = "pf::bf16" if template.kind is CppTemplateKind.PAIRS else "float"
        w.line(f"const {write_prologue(w, frame, prologue, depth, kind)} right = {{fill}};")
    with w.block(_FINISH, "};"):
        _Epilogue(frame).write(w)
    work = frame.settings.cpu.grain_elements * _WORK_PER_ELEMENT
    w.line(f"if (int64_t({rows}) * int64_t({columns}) * int64_t({depth}) < {work}) threads = 1;")
    w.line(f"{template.function}(left, right, {rows}, {columns}, {depth}, threads, finish);")
    names = frame.names
    assert all(names.is_written(name) for name in kernel.stored), f"{kernel.name} lacks a store"
    return KernelText(
        parameters_of(frame), w.text(), tuple(names.arguments), tuple(names.symbols),
        names.needs_status,
    )  # fmt: skip


def _matrix(frame: CppFrame, view: View) -> str:
    return f"pf::Matrix<{frame.names.storage(view.buffer)}>"


def _place(frame: CppFrame, view: View) -> str:
    """The first element of an operand, and the steps to the next row and column."""
    down, across = (f"int64_t({frame.dim(stride)})" for stride in view.strides)
    offset = "" if view.offset == 0 else f" + {frame.dim(view.offset)}"
    return f"{{{frame.names.argument(view.buffer)}{offset}, {down}, {across}}}"


class _Epilogue:
    """The loops over a finished block."""

    def __init__(self, frame: CppFrame) -> None:
        self.frame = frame
        self.kernel = frame.kernel
        assert frame.kernel.contraction is not None
        (self.matmul,) = frame.kernel.contraction.matmuls
        self.makers = {m.loop.out: m for m in frame.kernel.members}
        self.rows = [a for a in frame.kernel.axes if not a.reduced and a.atom is not None]
        self.columns = [a for a in frame.kernel.axes if a.reduced and a.atom is not None]
        index = frame.buffers[self.matmul.out].index(place_of(frame.kernel))
        self.sums = ex.load(_SUMS, index, DType.F32)
        self.result = result_value(self.matmul, frame.kernel, self.sums, frame.buffers)

    def write(self, w: Writer) -> None:
        with w.block("for (int64_t i = 0; i < rows; ++i) {"):
            w.line("const float* const sums = block + i * ld;")
            place_axes(w, self.frame, "top + i", self.rows)
            shared, body = w.child(), w.child()  # what all columns share is written before them
            scope = Scope(shared, frozenset(a.atom for a in self.rows if a.atom), None)
            if not self.columns:
                self._body(Scope(body, frozenset(), scope), "sums", None)
            elif len(self.columns) == 1:
                body.line(f"int64_t at_{self.columns[0].name} = first;")
                body.line("const int64_t end = first + columns;")
                self._lanes(body, scope, f"sums + ({self.columns[0].name} - first)")
            else:
                self._segments(body, scope)
            w.take(shared)
            w.take(body)

    def _segments(self, w: Writer, scope: Scope) -> None:
        """Columns of several axes: the lanes run along the last, to its end or the block's."""
        *outer, last = self.columns
        size = f"int64_t({self.frame.dim(last.size)})"
        with w.block("for (int64_t done = 0; done < columns;) {"):
            w.line(f"const int64_t start = (first + done) % {size};")
            w.line(
                f"const int64_t left_over = columns - done, end = "
                f"start + left_over < {size} ? start + left_over : {size};"
            )
            place_axes(w, self.frame, f"(first + done) / {size}", outer)
            shared, body = w.child(), w.child()
            inner = Scope(shared, frozenset(a.atom for a in outer if a.atom), scope)
            body.line(f"int64_t at_{last.name} = start;")
            self._lanes(body, inner, f"sums + (done + {last.name} - start)")
            w.take(shared)
            w.take(body)
            w.line("done += end - start;")

    def _lanes(self, w: Writer, scope: Scope, place: str) -> None:
        """Whole vectors of the last axis up to `end`, then what is left."""
        axis, lanes = self.columns[-1], self.frame.lanes
        assert axis.atom is not None
        name, known = axis.name, frozenset({axis.atom})
        with w.block(f"for (; at_{name} + {lanes} <= end; at_{name} += {lanes}) {{"):
            w.line(f"const int64_t {name} = at_{name};")
            self._body(Scope(w, known, scope), place, None)
        with w.block(f"if (at_{name} < end) {{"):
            w.line(f"const int64_t {name} = at_{name};")
            w.line(f"const int live = (int)(end - {name});")
            self._body(Scope(w, known, scope), place, "live")

    def _body(self, scope: Scope, place: str, tail: str | None) -> None:
        lane = self.columns[-1].atom if self.columns else None
        emitter = Emitter(self.frame.names, scope, lane, tail, self._resolver(place, tail))
        if self.matmul.out in self.kernel.stored:
            value = emitter.value(self.result)
            emitter.store(self.matmul.out, self.sums.index, value)
        for member in self.kernel.members:
            if member.loop.out in self.kernel.stored:
                value = self.frame.value_of(emitter, member, is_for_store=True)
                emitter.store(member.loop.out, member.loop.index, value)

    def _resolver(self, place: str, tail: str | None) -> Resolver:
        """Loads of the sums, of the matmul's result, and of what the epilogue itself computes."""

        def resolve(load: Expr) -> Value | Formula[Value] | None:
            name, index = load.attr
            if name == _SUMS:
                return self._sums(place, tail)
            if name == self.matmul.out and index is self.sums.index:
                return Formula(self._masked(load, self.result), resolve)
            maker = self.makers.get(name)
            if maker is None or index is not maker.loop.index:
                return None
            if self.frame.buffers[name].kind is not BufferKind.TEMP:
                return None  # an input that is updated in place is read as it was
            return Formula(self._masked(load, maker.loop.value), resolve)

        return resolve

    @staticmethod
    def _masked(load: Expr, value: Expr) -> Expr:
        """A value that is known everywhere, read where the load's mask holds."""
        return ex.apply("where", load.args[0], value, load.args[1]) if load.args else value

    def _sums(self, place: str, tail: str | None) -> Value:
        if not self.columns:
            return Value(f"pf::load1<float>({place})", DType.F32, 0)
        form, live = ("loadv", "") if tail is None else ("loadv_n", f", {tail}")
        return Value(f"pf::{form}<float>({place}{live})", DType.F32, 1)
