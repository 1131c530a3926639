"""One kernel of the Plan as one C++ function.

Items (rows, or blocks of a plain loop) are dealt out to threads; each row runs its stages, a
stage being a sweep over the columns on vectors. Lanes run along the columns where those are
contiguous, else along the rows (then every lane is a row of its own and nothing is summed across).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from perfuse.codegen.cpp.emit import Emitter, Names, Scope, Value
from perfuse.codegen.cpp.spelling import (
    ACCUMULATOR,
    COMBINE,
    COMPUTE_TYPE,
    identity,
)
from perfuse.codegen.writer import Writer
from perfuse.context import Context
from perfuse.ir import expr as ex
from perfuse.ir import index as ix
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.index import Atom, Dim
from perfuse.ir.program import Axis, Buffer
from perfuse.schedule.memory import num_bytes
from perfuse.schedule.plan import Kernel, Member, static_product

# A value needed by a later sweep is kept in a scratch row from this cost on, else recomputed.
_KEEP_COST = 5
_MOST_SCRATCH_ELEMENTS = 1 << 16
# Columns of a plain loop that make one work item; long enough to amortise, short enough to share.
_BLOCK = 4096
# A tile of a transposing loop: this many steps along each axis keep every cache line until it is used up.
_TILE_ROWS, _TILE_COLUMNS = 32, 64
# Rows between two flushes of column sums into their totals, so that error does not grow with rows.
_FLUSH_ROWS = 128


@dataclass(slots=True)
class KernelText:
    """A function body without its name, and what to pass to it."""

    parameters: str
    body: str
    arguments: tuple[str, ...]  # buffers, in order
    symbols: tuple[str, ...]
    needs_status: bool


@dataclass(slots=True)
class _Scratch:
    """Rows kept between sweeps: buffer -> (variable, C++ type)."""

    rows: dict[str, tuple[str, str]] = field(default_factory=dict)


def generate(kernel: Kernel, buffers: dict[str, Buffer], context: Context) -> KernelText:
    return _KernelWriter(kernel, buffers, context).run()


class _KernelWriter:
    def __init__(self, kernel: Kernel, buffers: dict[str, Buffer], context: Context) -> None:
        self.kernel = kernel
        self.buffers = buffers
        self.context = context
        self.lanes = context.target.lanes
        self.names = Names(buffers)
        self.makers = {m.loop.out: m for m in kernel.members}
        self.rows = [a for a in kernel.axes if not a.reduced]
        self.columns = [a for a in kernel.axes if a.reduced]
        self._split_axes()
        self.scratch = _Scratch()
        self.stream = {
            n for n in kernel.stored if self._is_streamed(n)
        }

    def _split_axes(self) -> None:
        """Decide the lane axis, and for plain kernels which axis is the column."""
        roles = {m.role for m in self.kernel.members}
        self.is_scan = "scan" in roles
        self.is_scatter = "scatter" in roles
        self.is_plain = not self.columns
        if self.is_plain and self.rows:
            self.columns = [self.rows.pop()]
        self.is_vertical = False
        lane = self.columns[-1] if self.columns else None
        if not self.is_plain and not self.is_scan and self.rows:
            last = self.kernel.axes[-1]
            if not last.reduced:
                self.is_vertical = True
                lane = last
        if self.is_scan:
            lane = None
        self.lane_axis = lane if lane is not None and lane.atom is not None else None
        self.lane: Atom | None = self.lane_axis.atom if self.lane_axis else None
        if self.is_vertical and self.lane_axis in self.rows:
            self.rows.remove(self.lane_axis)
        self.tile_axis = self._find_tile_axis()
        self.block = _BLOCK
        if self.tile_axis is not None:
            self.rows.remove(self.tile_axis)
            self.columns.insert(0, self.tile_axis)
            self.block = _TILE_COLUMNS
        self.tiles = self._turned_loads()

    def _turned_loads(self) -> dict[Expr, str]:
        """Loads that run across the lanes: each tile of them is turned once, then read straight."""
        if self.tile_axis is None or self.lane is None or self.tile_axis.atom is None:
            return {}
        found: dict[Expr, str] = {}
        for m in self.kernel.members:
            for read in m.loop.reads():
                across = ix.coefficient_of(read.attr[1], self.lane)
                along = ix.coefficient_of(read.attr[1], self.tile_axis.atom)
                from_data = any(a.kind == "value" for a in ix.atoms_of(read.attr[1]))
                if not read.args and along == 1 and across not in (0, 1, None):
                    if read.attr[0] not in self.makers and not from_data:
                        found.setdefault(read, f"tile{len(found)}")
        return found

    def _turn_tiles(self, w: Writer) -> None:
        assert self.tile_axis is not None and self.lane_axis is not None
        starts = {self.tile_axis.atom: "top", self.lane: "first"}
        wide = f"int64_t({self._dim(self.lane_axis.size)})"
        w.line(f"const int64_t wide = {wide} - first < {self.block} ? {wide} - first : {self.block};")
        for read, tile in self.tiles.items():
            buffer, index = read.attr
            pointer, kind = self.names.argument(buffer), self.names.storage(buffer)
            step = ix.coefficient_of(index, self.lane)  # type: ignore[arg-type]
            assert step is not None
            at = ix.render(index, lambda a: starts.get(a) or self._symbol_atom(a))
            w.line(
                f"pf::transpose_tile<{kind}>({pointer} + {at}, {self._dim(step)}, {tile}, "
                f"{_TILE_COLUMNS}, (int)wide, (int)(bottom - top));"
            )

    def _find_tile_axis(self) -> Axis | None:
        """The axis that some load runs along contiguously while the lanes do not."""
        if not self.is_plain or self.lane is None or self.is_scatter:
            return None
        for m in self.kernel.members:
            for read in m.loop.reads():
                index = read.attr[1]
                if ix.coefficient_of(index, self.lane) in (0, 1, None):
                    continue
                for axis in self.rows:
                    if axis.atom and ix.coefficient_of(index, axis.atom) == 1:
                        return axis
        return None

    def _is_streamed(self, name: str) -> bool:
        limit = self.context.settings.cpu.stream_store_bytes
        size = num_bytes(self.buffers[name])
        readers = [m for m in self.kernel.members for r in m.loop.reads() if r.attr[0] == name]
        return bool(limit) and size is not None and size >= limit and not readers

    # -- the whole -------------------------------------------------------------------------

    def run(self) -> KernelText:
        w = Writer(1)
        self._scratch_rows()
        body = Writer(2)
        self._thread_body(body)
        self._prologue(w)
        with w.block("const auto body = [&](int thread, int threads) {", "};"):
            self._thread_prologue(w)
            w.take(body)
            self._thread_epilogue(w)
        w.line("const int used = pf::parallel(threads, body);")
        w.line("(void)used;")
        self._combine(w)
        return KernelText(
            self._parameters(),
            w.text(),
            tuple(self.names.arguments),
            tuple(self.names.symbols),
            self.names.needs_status,
        )

    def _parameters(self) -> str:
        parts = []
        for buffer, name in self.names.arguments.items():
            const = "" if buffer in self.names.written else "const "
            parts.append(f"{const}{self.names.storage(buffer)}* __restrict {name}")
        parts += [f"int64_t {n}" for n in self.names.symbols.values()]
        if self.names.needs_status:
            parts.append("int64_t* status")
        parts.append("int threads")
        return ", ".join(parts)

    def _dim(self, dim: Dim) -> str:
        return ix.render(dim, self._symbol_atom)

    def _symbol_atom(self, atom: Atom) -> str:
        if atom.kind == "sym":
            return self.names.symbol(atom.parts[0])
        if atom.kind == "var":
            return str(atom.parts[0])
        assert atom.kind in ("div", "mod"), f"{atom} is read from data"
        a, b = (ix.render(p, self._symbol_atom) for p in atom.parts)
        if ix.is_nonnegative(ix.bounds(atom.parts[0])[0]):
            return f"(({a}) {'/' if atom.kind == 'div' else '%'} ({b}))"
        return f"pf::{'floordiv' if atom.kind == 'div' else 'mod'}(int64_t({a}), int64_t({b}))"

    def _prologue(self, w: Writer) -> None:
        count = " * ".join(f"int64_t({self._dim(a.size)})" for a in self._item_axes()) or "1"
        w.line(f"const int64_t items = {self._num_items(count)};")
        work = " * ".join(f"int64_t({self._dim(a.size)})" for a in self.kernel.axes) or "1"
        grain = self.context.settings.cpu.grain_elements // self._weight()
        w.line(f"if ({work} < {max(grain, 1)}) threads = 1;")
        w.line("if (items < threads) threads = items > 0 ? (int)items : 1;")
        if self.is_scatter and not self._parallel_axes():
            w.line("threads = 1;")
        self._shared_partials(w)

    def _weight(self) -> int:
        """How much dearer than an add an element is: dear elements are worth more threads."""
        return max(1, min(16, sum(m.loop.value.cost for m in self.kernel.members) // 4))

    def _item_axes(self) -> list[Axis]:
        if self.is_scatter:
            return self._parallel_axes()
        return self.rows

    def _parallel_axes(self) -> list[Axis]:
        """Axes along which a scatter cannot collide with itself."""
        index = self.kernel.members[0].loop.index
        inside: set[Atom] = set()
        for atom in ix.atoms_of(index):
            if atom.kind == "value":
                inside |= atom.parts[0].variables()
        safe = []
        for axis in self.kernel.axes:
            if axis.atom is None or axis.atom in inside or axis is self.lane_axis:
                continue
            stride = ix.coefficient_of(index, axis.atom)
            if isinstance(stride, int) and stride:
                safe.append(axis)
        return safe

    def _num_items(self, rows: str) -> str:
        if self.is_vertical:
            assert self.lane_axis is not None
            return f"{rows} * ((int64_t({self._dim(self.lane_axis.size)}) + {self.lanes - 1}) / {self.lanes})"
        if self._is_blocked():
            assert self.lane_axis is not None
            items = f"{rows} * ((int64_t({self._dim(self.lane_axis.size)}) + {self.block - 1}) / {self.block})"
            if self.tile_axis is not None:
                tall = self._dim(self.tile_axis.size)
                items += f" * ((int64_t({tall}) + {_TILE_ROWS - 1}) / {_TILE_ROWS})"
            return items
        return rows

    def _is_blocked(self) -> bool:
        """Plain loops over long columns deal out blocks of columns."""
        if not self.is_plain or self.lane_axis is None or self.is_scatter:
            return False
        size = self.lane_axis.size
        return self.tile_axis is not None or not isinstance(size, int) or size > _BLOCK

    # -- rows kept between sweeps ----------------------------------------------------------

    def _scratch_rows(self) -> None:
        size = static_product([a.size for a in self.columns])
        for m in self.kernel.members:
            if m.role != "full" or m.loop.out in self.kernel.stored:
                continue
            later = any(
                u.stage > m.stage and any(r.attr[0] == m.loop.out for r in u.loop.reads())
                for u in self.kernel.members
            )
            if not later or m.loop.value.cost < _KEEP_COST:
                continue
            if size is not None and size <= _MOST_SCRATCH_ELEMENTS:
                cpp = COMPUTE_TYPE[self.buffers[m.loop.out].dtype.compute]
                self.scratch.rows[m.loop.out] = (f"r{len(self.scratch.rows)}", cpp)

    def _thread_prologue(self, w: Writer) -> None:
        w.line("const int64_t begin = items * thread / threads, end = items * (thread + 1) / threads;")
        width = static_product([a.size for a in self.columns])
        if self.scratch.rows:
            assert width is not None
            padded = -(-width // self.lanes) * self.lanes
            step = padded * 8 * (self.lanes if self.is_vertical else 1)
            w.line(f"char* const rows = pf::scratch(0, {step * len(self.scratch.rows)});")
            for i, (name, cpp) in enumerate(self.scratch.rows.values()):
                w.line(f"{cpp}* const {name} = ({cpp}*)(rows + {i * step});")
        for read, tile in self.tiles.items():
            kind = self.names.storage(read.attr[0])
            w.line(f"alignas(64) {kind} {tile}[{_TILE_ROWS * _TILE_COLUMNS}];")
        for m in self._of_role("all"):
            w.line(f"{self._accumulator(m)} all_{self._short(m)};")
        for m in self._of_role("outer"):
            self._outer_start(w, m)

    def _of_role(self, role: str) -> list[Member]:
        return [m for m in self.kernel.members if m.role == role]

    def _short(self, m: Member) -> str:
        return f"m{self.kernel.members.index(m)}"

    def _accumulator(self, m: Member) -> str:
        return f"{ACCUMULATOR[m.loop.kind]}<{COMPUTE_TYPE[m.loop.value.dtype]}>"

    # -- reductions over rows --------------------------------------------------------------

    def _num_columns(self) -> str:
        return " * ".join(f"int64_t({self._dim(a.size)})" for a in self.columns) or "1"

    def _shared_partials(self, w: Writer) -> None:
        """Memory for what each thread reduces on its own, joined at the end."""
        outer = self._of_role("outer")
        if outer:
            w.line(f"const int64_t width = ({self._num_columns()} + {self.lanes - 1}) / "
                   f"{self.lanes} * {self.lanes};")
            w.line(f"char* const totals = pf::scratch(1, threads * width * 16 * {len(outer)});")
        for m in self._of_role("all"):
            w.line(f"{COMPUTE_TYPE[m.loop.value.dtype]} part_{self._short(m)}[1024];")
        if self._of_role("all"):
            w.line("if (threads > 1024) threads = 1024;")

    def _outer_start(self, w: Writer, m: Member) -> None:
        """Two rows of sums a thread: a recent one, flushed now and then into the total."""
        cpp = COMPUTE_TYPE[m.loop.value.dtype]
        name, place = self._short(m), self._of_role("outer").index(m)
        count = len(self._of_role("outer"))
        w.line(f"{cpp}* const sum_{name} = ({cpp}*)(totals + (thread * {count} + {place}) * width * 16);")
        w.line(f"{cpp}* const new_{name} = sum_{name} + width;")
        start = identity(m.loop.kind, m.loop.value.dtype)
        with w.block("for (int64_t i = 0; i < 2 * width; ++i) {"):
            w.line(f"sum_{name}[i] = {start};")

    def _flush(self, w: Writer, m: Member) -> None:
        cpp, name = COMPUTE_TYPE[m.loop.value.dtype], self._short(m)
        start = identity(m.loop.kind, m.loop.value.dtype)
        with w.block(f"for (int64_t i = 0; i < width; i += {self.lanes}) {{"):
            both = f"pf::loadv<{cpp}>(sum_{name} + i), pf::loadv<{cpp}>(new_{name} + i)"
            w.line(f"pf::storev<{cpp}>(sum_{name} + i, {COMBINE[m.loop.kind]}({both}));")
            w.line(f"pf::storev<{cpp}>(new_{name} + i, pf::splat({start}));")

    def _thread_epilogue(self, w: Writer) -> None:
        for m in self._of_role("outer"):
            self._flush(w, m)
        for m in self._of_role("all"):
            w.line(f"part_{self._short(m)}[thread] = all_{self._short(m)}.finish();")
        if self.stream:
            w.line("pf::stream_fence();")

    def _combine(self, w: Writer) -> None:
        for m in self._of_role("all"):
            name, out = self._short(m), m.loop.out
            w.line(f"for (int i = 1; i < used; ++i) part_{name}[0] = "
                   f"{COMBINE[m.loop.kind]}(part_{name}[0], part_{name}[i]);")
            self._store_result(w, out, self._dim(m.loop.index), f"part_{name}[0]", m)
        for m in self._of_role("outer"):
            self._combine_columns(w, m)

    def _store_result(self, w: Writer, out: str, at: str, text: str, m: Member) -> None:
        pointer, kind = self.names.argument(out), self.names.storage(out)
        self.names.written.add(out)
        target = COMPUTE_TYPE[self.buffers[out].dtype.compute]
        w.line(f"pf::store1<{kind}>({pointer} + {at}, pf::cast<{target}>({text}));")

    def _combine_columns(self, w: Writer, m: Member) -> None:
        cpp, name = COMPUTE_TYPE[m.loop.value.dtype], self._short(m)
        count, place = len(self._of_role("outer")), self._of_role("outer").index(m)
        opened = []
        for axis in self.columns:
            if axis.atom is not None:
                opened.append(w.block(
                    f"for (int64_t {axis.name} = 0; {axis.name} < {self._dim(axis.size)}; "
                    f"++{axis.name}) {{"
                ))
        for block in opened:
            block.__enter__()
        flat = self._flat_column()
        w.line(f"{cpp} total = (({cpp}*)(totals + {place} * width * 16))[{flat}];")
        w.line(f"for (int i = 1; i < used; ++i) total = {COMBINE[m.loop.kind]}(total, "
               f"(({cpp}*)(totals + (i * {count} + {place}) * width * 16))[{flat}]);")
        at = ix.render(m.loop.index, self._symbol_atom)
        self._store_result(w, m.loop.out, at, "total", m)
        for block in reversed(opened):
            block.__exit__(None, None, None)

    def _flat_column(self) -> str:
        total: Dim = 0
        for axis in self.columns:
            total = ix.add(ix.mul(total, axis.size), ix.var(axis.name, axis.size))
        return ix.render(total, self._symbol_atom)

    # -- one item --------------------------------------------------------------------------

    def _thread_body(self, w: Writer) -> None:
        with w.block("for (int64_t item = begin; item < end; ++item) {"):
            self._decode_item(w)
            if self.is_scatter:
                self._scatter_item(w)
            elif self.is_scan:
                self._scan_item(w)
            elif self.is_vertical:
                self._vertical_item(w)
            else:
                if self.tiles:
                    self._turn_tiles(w)
                self._row(w, None)
            outer = self._of_role("outer")
            if outer:
                with w.block(f"if ((item - begin) % {_FLUSH_ROWS} == {_FLUSH_ROWS - 1}) {{"):
                    for m in outer:
                        self._flush(w, m)

    def _decode_item(self, w: Writer) -> None:
        axes = [a for a in self._item_axes() if a.atom is not None]
        rest = "item"
        if self.is_vertical or self._is_blocked():
            assert self.lane_axis is not None
            step = self.lanes if self.is_vertical else self.block
            size = self._dim(self.lane_axis.size)
            w.line(f"const int64_t blocks = (int64_t({size}) + {step - 1}) / {step};")
            name = self.lane_axis.name if self.is_vertical else "first"
            w.line(f"const int64_t {name} = item % blocks * {step};")
            if axes or self.tile_axis is not None:
                w.line("const int64_t row = item / blocks;")
            rest = "row"
        if self.tile_axis is not None:
            tall = self._dim(self.tile_axis.size)
            w.line(f"const int64_t bands = (int64_t({tall}) + {_TILE_ROWS - 1}) / {_TILE_ROWS};")
            w.line(f"const int64_t top = row % bands * {_TILE_ROWS};")
            w.line(f"const int64_t bottom = top + {_TILE_ROWS} < {tall} ? top + {_TILE_ROWS} : {tall};")
            w.line("const int64_t plane = row / bands;")
            rest = "plane"
        for i in reversed(range(len(axes))):
            axis = axes[i]
            if i == 0:
                w.line(f"const int64_t {axis.name} = {rest};")
            else:
                w.line(f"const int64_t {axis.name} = {rest} % ({self._dim(axis.size)});")
                after = f"{rest}_{i}" if rest != "item" else f"rest_{i}"
                w.line(f"const int64_t {after} = {rest} / ({self._dim(axis.size)});")
                rest = after

    def _vertical_item(self, w: Writer) -> None:
        assert self.lane_axis is not None
        size = self.lane_axis.size
        if isinstance(size, int) and size % self.lanes == 0:
            self._row(w, None)
            return
        name = self.lane_axis.name
        w.line(f"const int64_t left = int64_t({self._dim(size)}) - {name};")
        if not isinstance(size, int) or size > self.lanes:
            with w.block(f"if (left >= {self.lanes}) {{"):
                self._row(w, None)
            with w.block("else {"):
                w.line("const int live = (int)left;")
                self._row(w, "live")
        else:
            w.line("const int live = (int)left;")
            self._row(w, "live")

    def _row(self, w: Writer, tail: str | None) -> None:
        """Stages in order: values of the row, then the sweep over its columns."""
        known = frozenset(a.atom for a in self._item_axes() if a.atom is not None)
        if self.is_vertical and self.lane is not None:
            known |= {self.lane}
        row = Scope(w, known, None)
        results: dict[str, Value] = {}
        for number in range(1 + max((m.stage for m in self.kernel.members), default=0)):
            members = [m for m in self.kernel.members if m.stage == number]
            self._row_values([m for m in members if m.role == "row"], row, results, tail)
            sweep = [m for m in members if m.role in ("full", "inner", "outer", "all")]
            if sweep:
                self._sweep(w, row, sweep, results, tail)

    def _row_values(
        self, members: Sequence[Member], row: Scope, results: dict[str, Value], tail: str | None
    ) -> None:
        lane = self.lane if self.is_vertical else None
        emitter = Emitter(self.names, row, lane, tail, self._resolver(results, None))
        for m in members:
            value = self._converted(emitter, m)
            results[m.loop.out] = value
            if m.loop.out in self.kernel.stored:
                emitter.store(m.loop.out, m.loop.index, value)

    def _converted(self, emitter: Emitter, m: Member) -> Value:
        """A member's value in the compute type of its buffer."""
        formula = m.loop.value
        kind = self.buffers[m.loop.out].dtype
        if formula.op == "round_to" and formula.attr is kind and self._only_stored(m):
            formula = formula.args[0]  # the store rounds anyway
        value = emitter.value(formula)
        target = kind.compute
        if value.dtype is target:
            return value
        text = f"pf::cast<{COMPUTE_TYPE[target]}>({value.text})"
        return emitter._local(Value(text, target, value.is_vector))

    def _only_stored(self, m: Member) -> bool:
        """Nothing else in the kernel takes the value from a register."""
        return not any(r.attr[0] == m.loop.out for u in self.kernel.members for r in u.loop.reads())

    def _resolver(self, results: dict[str, Value], stage: int | None):  # type: ignore[no-untyped-def]
        """Where a load of something this kernel makes finds it."""

        def resolve(e: Expr) -> Value | Expr | None:
            name, index = e.attr
            if e in self.tiles:
                return self._tile_read(e)
            maker = self.makers.get(name)
            if maker is None or index is not maker.loop.index:
                return None
            if e.args:  # made at every place, so it may be taken and then masked
                mask, fill = e.args
                return ex.apply("where", mask, ex.load(name, index, self.buffers[name].dtype), fill)
            if name in results:
                return results[name]
            if maker.role != "full" or maker.loop.kind != "map" or stage is None:
                return None
            if maker.stage == stage:
                return maker.loop.value if self.buffers[name].role == "temp" else None
            if maker.stage > stage or name in self.kernel.stored:
                return None
            kept = self.scratch.rows.get(name)
            if kept is not None:
                return self._scratch_read(kept, name)
            return maker.loop.value

        return resolve

    def _scratch_read(self, kept: tuple[str, str], name: str) -> Value:
        variable, cpp = kept
        at = self._scratch_index()
        dtype = self.buffers[name].dtype.compute
        if self.lane is None:
            return Value(f"pf::load1<{cpp}>({variable} + {at})", dtype, False)
        return Value(f"pf::loadv<{cpp}>({variable} + {at})", dtype, True)

    def _tile_read(self, e: Expr) -> Value:
        assert self.tile_axis is not None and self.lane_axis is not None
        kind = self.names.storage(e.attr[0])
        at = f"({self.tile_axis.name} - top) * {_TILE_COLUMNS} + {self.lane_axis.name} - first"
        return Value(f"pf::loadv<{kind}>({self.tiles[e]} + {at})", e.dtype, True)

    def _scratch_index(self) -> str:
        flat = self._flat_column()
        return f"({flat}) * {self.lanes}" if self.is_vertical else flat

    # -- one sweep -------------------------------------------------------------------------

    def _sweep(
        self, w: Writer, row: Scope, members: list[Member], results: dict[str, Value], tail: str | None
    ) -> None:
        inner = [m for m in members if m.role == "inner"]
        folding = [m for m in members if m.role in ("inner", "all")]
        unroll = self._unroll(members, folding)
        for m in folding:
            for u in range(unroll):
                w.line(f"{self._accumulator(m)} {self._acc(m, u)};")
        before, loop = w.child(), w.child()
        scope = Scope(before, frozenset(), row)
        scope.variables = row.variables
        self._loops(loop, scope, members, results, tail, unroll)
        w.take(before)
        w.take(loop)
        for m in folding:
            for u in range(1, unroll):
                w.line(f"{self._acc(m, 0)}.merge({self._acc(m, u)});")
            if m.role == "all":
                w.line(f"all_{self._short(m)}.merge({self._acc(m, 0)});")
        for m in inner:
            self._finish(w, row, m, results, tail)

    def _acc(self, m: Member, u: int) -> str:
        return f"acc_{self._short(m)}_{u}"

    def _unroll(self, members: list[Member], folding: list[Member]) -> int:
        """Several accumulators hide the latency of one chain of adds; not for long bodies."""
        if not folding or self.is_vertical or self.lane is None:
            return 1
        size = self.lane_axis.size if self.lane_axis else 1
        if isinstance(size, int) and size < 2 * self.lanes:
            return 1
        cost = sum(m.loop.value.cost + m.loop.value.num_loads for m in members)
        return 4 if cost <= 8 else 2 if cost <= 40 else 1

    def _finish(
        self, w: Writer, row: Scope, m: Member, results: dict[str, Value], tail: str | None
    ) -> None:
        """The result of a reduction, for the rest of the row."""
        acc = self._acc(m, 0)
        text = f"pf::by_lane({acc})" if self.is_vertical else f"{acc}.finish()"
        dtype = DType.I64 if m.loop.kind.startswith("arg") else m.loop.value.dtype
        target = self.buffers[m.loop.out].dtype.compute
        if dtype is not target:
            text = f"pf::cast<{COMPUTE_TYPE[target]}>({text})"
        name = self.names.local()
        w.line(f"const auto {name} = {text};")
        value = Value(name, target, self.is_vertical)
        results[m.loop.out] = value
        if m.loop.out in self.kernel.stored:
            lane = self.lane if self.is_vertical else None
            emitter = Emitter(self.names, row, lane, tail, self._resolver(results, None))
            emitter.store(m.loop.out, m.loop.index, value)

    def _loops(
        self,
        w: Writer,
        scope: Scope,
        members: list[Member],
        results: dict[str, Value],
        tail: str | None,
        unroll: int,
    ) -> None:
        axes = [a for a in self.columns if a.atom is not None and a is not self.lane_axis]
        blocks = [w.block(self._for(a)) for a in axes]
        for block in blocks:
            block.__enter__()
        variables = frozenset(a.atom for a in axes if a.atom is not None)
        if self.is_vertical or self.lane_axis is None:
            inside = Scope(w, variables, scope)
            self._body(inside, members, results, tail, 0)
        else:
            self._lane_loops(w, scope, variables, members, results, unroll)
        for block in reversed(blocks):
            block.__exit__(None, None, None)

    def _for(self, axis: Axis) -> str:
        name, first, last = axis.name, "0", self._dim(axis.size)
        if axis is self.tile_axis:
            first, last = "top", "bottom"
        return f"for (int64_t {name} = {first}; {name} < {last}; ++{name}) {{"

    def _lane_loops(
        self,
        w: Writer,
        scope: Scope,
        variables: frozenset[Atom],
        members: list[Member],
        results: dict[str, Value],
        unroll: int,
    ) -> None:
        assert self.lane_axis is not None and self.lane is not None
        axis, lanes = self.lane_axis, self.lanes
        blocked = self._is_blocked()
        size = axis.size
        start = "first" if blocked else "0"
        total = f"int64_t({self._dim(size)})"
        w.line("{")
        if blocked:
            w.line(f"const int64_t last = first + {self.block} < {total} ? first + {self.block} : {total};")
            total = "last"
        w.line(f"int64_t at_{axis.name} = {start};")
        known = variables | {self.lane}
        exact = isinstance(size, int) and size % lanes == 0
        name = axis.name

        def piece(step: int, unrolled: int) -> None:
            with w.block(f"for (; at_{name} + {step} <= {total}; at_{name} += {step}) {{"):
                for u in range(unrolled):
                    with w.block("{"):
                        w.line(f"const int64_t {name} = at_{name} + {u * lanes};" if u else
                               f"const int64_t {name} = at_{name};")
                        self._body(Scope(w, known, scope), members, results, None, u)

        if unroll > 1:
            piece(unroll * lanes, unroll)
        remainder = unroll == 1 or not (
            isinstance(size, int) and size % (unroll * lanes) == 0 and not blocked
        )
        if remainder and not (isinstance(size, int) and size < lanes):
            piece(lanes, 1)
        if not exact:
            with w.block(f"if (at_{name} < {total}) {{"):
                w.line(f"const int64_t {name} = at_{name};")
                w.line(f"const int live = (int)({total} - {name});")
                self._body(Scope(w, known, scope), members, results, "live", 0)
        w.line("}")

    def _body(
        self,
        scope: Scope,
        members: list[Member],
        results: dict[str, Value],
        tail: str | None,
        u: int,
    ) -> None:
        stage = members[0].stage
        emitter = Emitter(self.names, scope, self.lane, tail, self._resolver(results, stage))
        for m in members:
            if m.role == "full":
                self._full(emitter, m)
            elif m.role == "outer":
                self._outer_step(emitter, m)
            else:
                self._fold(emitter, m, u)

    def _full(self, emitter: Emitter, m: Member) -> None:
        name = m.loop.out
        kept = self.scratch.rows.get(name)
        if name not in self.kernel.stored and kept is None:
            return  # computed where it is used
        value = self._converted(emitter, m)
        if name in self.kernel.stored:
            emitter.store(name, m.loop.index, value, stream=name in self.stream)
        if kept is not None:
            variable, cpp = kept
            at = self._scratch_index()
            if self.lane is None:
                emitter.scope.writer.line(f"pf::store1<{cpp}>({variable} + {at}, {value.text});")
            else:
                emitter.scope.writer.line(f"pf::storev<{cpp}>({variable} + {at}, {value.vector});")

    def _outer_step(self, emitter: Emitter, m: Member) -> None:
        value = emitter.value(m.loop.value)
        cpp = COMPUTE_TYPE[m.loop.value.dtype]
        place = f"new_{self._short(m)} + {self._flat_column()}"
        combine = COMBINE[m.loop.kind]
        line = emitter.scope.writer.line
        if self.lane is None:
            line(f"pf::store1<{cpp}>({place}, {combine}(pf::load1<{cpp}>({place}), {value.text}));")
        elif emitter.tail is None:
            line(f"pf::storev<{cpp}>({place}, {combine}(pf::loadv<{cpp}>({place}), {value.vector}));")
        else:
            line(f"pf::storev_n<{cpp}>({place}, {combine}(pf::loadv_n<{cpp}>({place}, live), "
                 f"{value.vector}), live);")

    def _fold(self, emitter: Emitter, m: Member, u: int) -> None:
        value = emitter.value(m.loop.value)
        arguments = [value.vector]
        if m.loop.kind.startswith("arg"):
            arguments.append(self._position(m))
        # Lanes that are rows of their own may hold anything past the end, unless all rows are joined.
        partial = emitter.tail is not None and (not self.is_vertical or m.role == "all")
        if partial or (self.lane is None):
            arguments.append(emitter.tail if partial else "1")  # type: ignore[arg-type]
            emitter.scope.writer.line(f"{self._acc(m, u)}.step_n({', '.join(arguments)});")
        else:
            emitter.scope.writer.line(f"{self._acc(m, u)}.step({', '.join(arguments)});")

    def _position(self, m: Member) -> str:
        """The place of an element among those reduced, as the user counts them."""
        total: Dim = 0
        for axis in self.columns:
            total = ix.add(ix.mul(total, axis.size), ix.var(axis.name, axis.size))
        text = ix.render(total, self._symbol_atom)
        if self.is_vertical or self.lane is None:
            return f"pf::splat(int64_t({text}))"
        return f"pf::iota<int64_t>({text})"

    # -- scans and scatters ----------------------------------------------------------------

    def _scan_item(self, w: Writer) -> None:
        (m,) = self.kernel.members
        axis = self.columns[-1]
        dtype = m.loop.value.dtype
        wide = DType.F64 if dtype.is_float else dtype
        cpp = COMPUTE_TYPE[wide]
        w.line(f"{cpp} running = {identity(m.loop.kind, wide)};")
        known = frozenset(a.atom for a in self.rows if a.atom is not None)
        with w.block(f"for (int64_t {axis.name} = 0; {axis.name} < {self._dim(axis.size)}; ++{axis.name}) {{"):
            atoms = known | ({axis.atom} if axis.atom is not None else set())
            emitter = Emitter(self.names, Scope(w, atoms, None), None, None, lambda e: None)
            value = emitter.value(m.loop.value)
            w.line(f"running = {COMBINE[m.loop.kind]}(running, {cpp}({value.text}));")
            target = self.buffers[m.loop.out].dtype.compute
            text = f"pf::cast<{COMPUTE_TYPE[target]}>(running)"
            emitter.store(m.loop.out, m.loop.index, Value(text, target, False))

    def _scatter_item(self, w: Writer) -> None:
        (m,) = self.kernel.members
        item_axes = self._item_axes()
        loops = [
            a for a in self.kernel.axes
            if a.atom is not None and a not in item_axes and a is not self.lane_axis
        ]
        blocks = [
            w.block(f"for (int64_t {a.name} = 0; {a.name} < {self._dim(a.size)}; ++{a.name}) {{")
            for a in loops
        ]
        for block in blocks:
            block.__enter__()
        known = frozenset(a.atom for a in (*item_axes, *loops) if a.atom is not None)
        scope = Scope(w, known, None)
        if self.lane_axis is None:
            self._scatter_body(Scope(w, frozenset(), scope), m, None)
        else:
            self._scatter_lanes(w, scope, m)
        for block in reversed(blocks):
            block.__exit__(None, None, None)

    def _scatter_lanes(self, w: Writer, scope: Scope, m: Member) -> None:
        assert self.lane_axis is not None and self.lane is not None
        name, total = self.lane_axis.name, f"int64_t({self._dim(self.lane_axis.size)})"
        before, loop = w.child(), w.child()
        outside = Scope(before, scope.variables, None)
        loop.line(f"int64_t at_{name} = 0;")
        step = f"at_{name} += {self.lanes}"
        with loop.block(f"for (; at_{name} + {self.lanes} <= {total}; {step}) {{"):
            loop.line(f"const int64_t {name} = at_{name};")
            self._scatter_body(Scope(loop, frozenset({self.lane}), outside), m, None)
        with loop.block(f"if (at_{name} < {total}) {{"):
            loop.line(f"const int64_t {name} = at_{name};")
            loop.line(f"const int live = (int)({total} - {name});")
            self._scatter_body(Scope(loop, frozenset({self.lane}), outside), m, "live")
        w.take(before)
        w.take(loop)

    def _scatter_body(self, scope: Scope, m: Member, tail: str | None) -> None:
        emitter = Emitter(self.names, scope, self.lane, tail, lambda e: None)
        value = self._converted(emitter, m)
        if m.loop.kind != "scatter_add":
            emitter.store(m.loop.out, m.loop.index, value)
            return
        out = m.loop.out
        pointer, kind = self.names.argument(out), self.names.storage(out)
        self.names.written.add(out)
        index, is_vector = emitter.index(m.loop.index)
        add = "pf::lor" if self.buffers[out].dtype is DType.BOOL else "pf::add"
        if self.lane is None:
            place = f"{pointer} + {index}"
            scope.writer.line(f"pf::store1<{kind}>({place}, {add}(pf::load1<{kind}>({place}), {value.text}));")
            return
        stride = ix.coefficient_of(m.loop.index, self.lane)
        live = tail or "pf::lanes"
        if stride == 1:
            place = f"{pointer} + {ix.render(m.loop.index, emitter._atom)}"
            held = f"pf::loadv_n<{kind}>({place}, {live})" if tail else f"pf::loadv<{kind}>({place})"
            put = f"storev_n<{kind}>({place}, {add}({held}, {value.vector}), {live})" if tail else (
                f"storev<{kind}>({place}, {add}({held}, {value.vector}))"
            )
            scope.writer.line(f"pf::{put};")
            return
        at = index if is_vector else f"pf::splat(int64_t({index}))"
        scope.writer.line(f"pf::scatter_add_n<{kind}>({pointer}, {at}, {value.vector}, {live});")

