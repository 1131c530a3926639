"""A row, stage by stage: the values of the row, then a sweep over its columns on vectors."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from perfuse.codegen.cpp.emit import Emitter, Resolver, Scope, Value
from perfuse.codegen.cpp.frame import CppFrame
from perfuse.codegen.cpp.partials import Partials
from perfuse.codegen.cpp.spelling import COMPUTE_TYPE
from perfuse.codegen.cpp.tiles import Tiles
from perfuse.codegen.emitter import Formula
from perfuse.codegen.writer import Writer
from perfuse.ir import expr as ex
from perfuse.ir.dtype import DType
from perfuse.ir.expr import Expr
from perfuse.ir.program import BufferKind
from perfuse.schedule.arena import num_bytes
from perfuse.schedule.plan import Member, Role, static_product

# A value needed by a later sweep is kept in a scratch row from this cost on, else recomputed.
_KEEP_COST = 5
_MOST_SCRATCH_ELEMENTS = 1 << 16
_TYPICAL_CACHE_BYTES = 32 << 20
# Outputs smaller than this part of the last-level cache stay in it.
_LEAST_SHARE = 8
# Beyond this cost a kernel is a straight line of vector code, on which compilers spend seconds.
_LONG_COST, _LONG_COST_PER_LOAD = 600, 16
# So is a chain of this many loops that pass each other values in registers.
_LONG_CHAIN = 24


def is_long(members: Sequence[Member]) -> bool:
    """Whether arithmetic dominates, so that neither loads nor the loop around matter."""
    cost = sum(m.loop.value.cost for m in members)
    num_loads = sum(m.loop.value.num_loads for m in members)
    return cost > max(_LONG_COST, _LONG_COST_PER_LOAD * num_loads)


def is_long_chain(members: Sequence[Member], stored: Set[str]) -> bool:
    """Whether these are long, or many and pass each other nearly everything in registers."""
    if len(members) < _LONG_CHAIN or is_long(members):
        return is_long(members)
    made = {m.loop.out for m in members}
    read = {e for m in members for e in m.loop.reads() if e.buffer not in made}
    cost = sum(m.loop.value.cost for m in members)
    return cost > _LONG_COST_PER_LOAD * (len(read) + len(made & stored))


@dataclass(slots=True)
class RowWriter:
    """A row being written: its scope, the live lanes of a partial vector, what is known so far."""

    scope: Scope
    tail: str | None
    results: dict[str, Value] = field(default_factory=dict)

    @property
    def writer(self) -> Writer:
        return self.scope.writer


class Sweeps:
    """The text of a kernel's rows."""

    def __init__(self, frame: CppFrame, partials: Partials) -> None:
        self.frame = frame
        self.kernel = frame.kernel
        self.shape = frame.shape
        self.partials = partials
        self.tiles = Tiles(frame)
        self.makers = {m.loop.out: m for m in self.kernel.members}
        self.kept = self._kept_rows()
        self.streamed = {n for n in self.kernel.stored if self._is_streamed(n)}

    def _kept_rows(self) -> dict[str, str]:
        """Buffers that only later sweeps of the same row read: buffer -> scratch variable."""
        size = static_product([a.size for a in self.shape.columns])
        kept: dict[str, str] = {}
        if size is None or size > _MOST_SCRATCH_ELEMENTS:
            return kept
        for m in self.frame.of_role(Role.FULL):
            is_wanted = m.loop.value.cost >= _KEEP_COST and self._is_read_later(m)
            if is_wanted and m.loop.out not in self.kernel.stored:
                kept[m.loop.out] = f"r{len(kept)}"
        return kept

    def _is_read_later(self, m: Member) -> bool:
        return any(
            user.stage > m.stage and any(r.buffer == m.loop.out for r in user.loop.reads())
            for user in self.kernel.members
        )

    def _is_streamed(self, name: str) -> bool:
        """Outputs that would be evicted before they are read use non-temporal stores."""
        limit = self.frame.settings.cpu.stream_store_bytes
        size = num_bytes(self.frame.buffers[name])
        is_cached = self.frame.is_read_inside(name) or name in self.frame.names.over
        if limit == 0 or size is None or is_cached:
            return False
        if limit is not None:
            return size >= limit
        cache = self.frame.target.l3_bytes or _TYPICAL_CACHE_BYTES
        if name in self.frame.read_again:
            # Part of a slightly larger one stays cached and is read faster: convnext 107 ms (117).
            return size >= 2 * cache
        # It is not read soon, so it would only evict what this kernel reads. On one thread with
        # 32 MiB of cache: `add` of 3 x 16 MiB 1.33 ms instead of 2.26, `layer_norm` of 2 x 16 MiB
        # 1.39 instead of 1.78. But most of what `e5m2_dq` moves, 4 and 16 MiB, is its output, which
        # the cache holds from call to call: 0.34 ms, and 0.60 with non-temporal stores.
        moved = self.kernel.num_bytes
        if moved < cache and 2 * size > moved:
            return False
        return size >= cache // _LEAST_SHARE and moved >= cache // 2

    def declare(self, w: Writer) -> None:
        """A thread's scratch rows and tiles."""
        if self.kept:
            width = static_product([a.size for a in self.shape.columns])
            assert width is not None
            lanes = self.frame.lanes
            if len(self.shape.columns) > 1 and not self._has_whole_vectors():
                width += lanes  # the last vector of the last piece of a row may go past its end
            step = -(-width // lanes) * lanes * 8 * (lanes if self.shape.is_vertical else 1)
            w.line(f"char* const rows = pf::scratch(0, {step * len(self.kept)});")
            for i, (buffer, name) in enumerate(self.kept.items()):
                cpp = self._scratch_type(buffer)
                w.line(f"{cpp}* const {name} = ({cpp}*)(rows + {i * step});")
        self.tiles.declare(w)

    def _has_whole_vectors(self) -> bool:
        axis = self.shape.lane_axis
        size = axis.size if axis is not None and not self.shape.is_vertical else 0
        return isinstance(size, int) and size % self.frame.lanes == 0

    def _scratch_type(self, buffer: str) -> str:
        return COMPUTE_TYPE[self.frame.buffers[buffer].dtype.compute]

    # -- one item --------------------------------------------------------------------------

    def item(self, w: Writer) -> None:
        """A row, or a vector of rows, or a block or tile of a plain loop."""
        self.tiles.turn(w)
        if not self.shape.is_vertical or self.shape.lane_axis is None:
            self._row(w, None)
            return
        axis, lanes = self.shape.lane_axis, self.frame.lanes
        if isinstance(axis.size, int) and axis.size % lanes == 0:
            self._row(w, None)
            return
        w.line(f"const int64_t left = int64_t({self.frame.dim(axis.size)}) - {axis.name};")
        if not (isinstance(axis.size, int) and axis.size < lanes):
            with w.block(f"if (left >= {lanes}) {{"):
                self._row(w, None)
        with w.block(f"if (left < {lanes}) {{"):
            w.line("const int live = (int)left;")
            self._row(w, "live")

    def _row(self, w: Writer, tail: str | None) -> None:
        known = frozenset(a.atom for a in self.shape.rows if a.atom is not None)
        if self.shape.is_vertical and self.shape.lane is not None:
            known |= {self.shape.lane}
        row = RowWriter(Scope(w, known, None), tail)
        for number in range(1 + max((m.stage for m in self.kernel.members), default=0)):
            members = [m for m in self.kernel.members if m.stage == number]
            self._row_values([m for m in members if m.role == Role.ROW], row)
            swept = [m for m in members if m.role != Role.ROW]
            if swept:
                self._sweep(row, swept)

    def _row_values(self, members: Sequence[Member], row: RowWriter) -> None:
        emitter = self._row_emitter(row)
        for m in members:
            value = self.frame.value_of(emitter, m)
            row.results[m.loop.out] = value
            if m.loop.out in self.kernel.stored:
                emitter.store(m.loop.out, m.loop.index, value)

    def _row_emitter(self, row: RowWriter) -> Emitter:
        lane = self.shape.lane if self.shape.is_vertical else None
        return Emitter(self.frame.names, row.scope, lane, row.tail, self._resolver(row, None))

    # -- where a load of something made in this kernel finds it ----------------------------

    def _resolver(self, row: RowWriter, stage: int | None) -> Resolver:
        def resolve(load: Expr) -> Value | Formula[Value] | None:
            found = self._find(load, row, stage)
            return Formula(found, resolve) if isinstance(found, Expr) else found

        return resolve

    def _find(self, load: Expr, row: RowWriter, stage: int | None) -> Value | Expr | None:
        """A variable, a formula to compute in place, or None: read memory."""
        name, index = load.attr
        turned = self.tiles.read(load)
        if turned is not None:
            return turned
        maker = self.makers.get(name)
        if maker is None or index is not maker.loop.index:
            return None
        if load.args:  # computed everywhere, so it may be read and then masked
            mask, fill = load.args
            whole = ex.load(name, index, self.frame.buffers[name].dtype)
            return ex.apply("where", mask, whole, fill)
        if name in row.results:
            return row.results[name]
        if not maker.is_map or stage is None:
            return None
        if maker.stage == stage:
            return maker.loop.value if self.frame.buffers[name].kind == BufferKind.TEMP else None
        if maker.stage > stage or name in self.kernel.stored:
            return None
        return self._kept_value(name) if name in self.kept else maker.loop.value

    def _kept_value(self, name: str) -> Value:
        cpp, place = self._scratch_type(name), self._kept_place(name)
        dtype = self.frame.buffers[name].dtype.compute
        load = "load1" if self.shape.lane is None else "loadv"
        return Value(f"pf::{load}<{cpp}>({place})", dtype, self.shape.lane is not None)

    def _kept_place(self, name: str) -> str:
        flat = self.frame.flat_column()
        if self.shape.is_vertical:
            flat = f"({flat}) * {self.frame.lanes}"
        return f"{self.kept[name]} + {flat}"

    # -- one sweep -------------------------------------------------------------------------

    def _sweep(self, row: RowWriter, members: list[Member]) -> None:
        folding = [m for m in members if m.role in (Role.INNER, Role.ALL)]
        unroll = self._unroll(members, folding)
        w = row.writer
        for m in folding:
            names = ", ".join(self._accumulator(m, u) for u in range(unroll))
            w.line(f"{self.frame.accumulator(m)} {names};")
        before, loop = w.child(), w.child()
        scope = Scope(before, frozenset(), row.scope)
        self._loops(loop, scope, row, members, unroll)
        w.take(before)
        w.take(loop)
        for m in folding:
            for u in range(1, unroll):
                w.line(f"{self._accumulator(m, 0)}.merge({self._accumulator(m, u)});")
            if m.role == Role.ALL:
                w.line(f"all_{self.frame.short(m)}.merge({self._accumulator(m, 0)});")
            else:
                self._finish(row, m)

    def _accumulator(self, m: Member, u: int) -> str:
        return f"acc_{self.frame.short(m)}_{u}"

    def _unroll(self, members: list[Member], folding: list[Member]) -> int:
        """Several accumulators hide the latency of one chain of adds; not for long bodies."""
        axis = self.shape.lane_axis
        if not folding or self.shape.is_vertical or axis is None:
            return 1
        if isinstance(axis.size, int) and axis.size < 2 * self.frame.lanes:
            return 1
        cost = sum(m.loop.value.cost + m.loop.value.num_loads for m in members)
        return 4 if cost <= 8 else 2 if cost <= 40 else 1

    def _finish(self, row: RowWriter, m: Member) -> None:
        """The result of a reduction, for the rest of the row."""
        accumulator = self._accumulator(m, 0)
        is_vector = self.shape.is_vertical
        text = f"pf::by_lane({accumulator})" if is_vector else f"{accumulator}.finish()"
        dtype = DType.I64 if m.loop.kind.is_position else m.loop.value.dtype
        emitter = self._row_emitter(row)
        target = self.frame.buffers[m.loop.out].dtype.compute
        value = emitter.converted(emitter.named(Value(text, dtype, is_vector)), target)
        row.results[m.loop.out] = value
        if m.loop.out in self.kernel.stored:
            emitter.store(m.loop.out, m.loop.index, value)

    def _loops(
        self, w: Writer, scope: Scope, row: RowWriter, members: list[Member], unroll: int
    ) -> None:
        lane_axis = self.shape.lane_axis
        axes = [a for a in self.shape.columns if a.atom is not None and a is not lane_axis]
        with w.blocks(self.frame.loop_over(a) for a in axes):
            before, loop = w.child(), w.child()
            inside = Scope(before, frozenset(a.atom for a in axes if a.atom), scope)
            if self.shape.is_vertical or lane_axis is None:
                self._body(Scope(loop, frozenset(), inside), row, members, row.tail, 0)
            else:
                self._lane_loops(loop, inside, row, members, unroll)
            w.take(before)
            w.take(loop)

    def _lane_loops(
        self, w: Writer, scope: Scope, row: RowWriter, members: list[Member], unroll: int
    ) -> None:
        """Whole vectors, several at a time where that is faster, then the rest."""
        axis, lanes, block = self.shape.lane_axis, self.frame.lanes, self.shape.block
        assert axis is not None and axis.atom is not None
        known, name, size = frozenset({axis.atom}), axis.name, axis.size
        total, start = f"int64_t({self.frame.dim(size)})", "0"
        with w.block("{"):
            if block is not None:
                end = f"first + {block}"
                w.line(f"const int64_t last = {end} < {total} ? {end} : {total};")
                total, start = "last", "first"
            w.line(f"int64_t at_{name} = {start};")
            has_rest = not (isinstance(size, int) and size % lanes == 0)
            # A long body is written once, for whole and partial vectors alike.
            is_map = all(m.role == Role.FULL for m in members)
            is_once = has_rest and is_map and is_long_chain(members, self.kernel.stored)
            for count in () if is_once else (unroll, 1) if unroll > 1 else (1,):
                if self._fits(size, count, unroll):
                    step = count * lanes
                    with w.block(f"for (; at_{name} + {step} <= {total}; at_{name} += {step}) {{"):
                        for u in range(count):
                            with w.block("{"):
                                w.line(f"const int64_t {name} = at_{name} + {u * lanes};")
                                self._body(Scope(w, known, scope), row, members, None, u)
            if has_rest:
                head = f"for (; at_{name} < {total}; at_{name} += {lanes})" if is_once else None
                with w.block(f"{head or f'if (at_{name} < {total})'} {{"):
                    w.line(f"const int64_t {name} = at_{name};")
                    left = f"{total} - {name}"
                    limit = f"{left} < {lanes} ? {left} : {lanes}" if is_once else left
                    w.line(f"const int live = (int)({limit});")
                    self._body(Scope(w, known, scope), row, members, "live", 0)

    def _fits(self, size: object, count: int, unroll: int) -> bool:
        """Whether a loop in steps of `count` vectors ever runs."""
        if not isinstance(size, int):
            return True
        step = count * self.frame.lanes
        if count == 1 and unroll > 1 and self.shape.block is None:
            return size % (unroll * self.frame.lanes) >= step
        return size >= step

    def _body(
        self, scope: Scope, row: RowWriter, members: list[Member], tail: str | None, u: int
    ) -> None:
        stage = members[0].stage
        resolve = self._resolver(row, stage)
        emitter = Emitter(self.frame.names, scope, self.shape.lane, tail, resolve)
        for m in members:
            if m.role == Role.FULL:
                self._full(emitter, m)
            elif m.role == Role.OUTER:
                self.partials.step(emitter, m)
            else:
                self._fold(emitter, m, u)

    def _full(self, emitter: Emitter, m: Member) -> None:
        name = m.loop.out
        if name not in self.kernel.stored and name not in self.kept:
            return  # computed where it is used
        value = self.frame.value_of(emitter, m, is_for_store=name not in self.kept)
        if name in self.kernel.stored:
            emitter.store(name, m.loop.index, value, stream=name in self.streamed)
        if name in self.kept:
            form, text = ("1", value.text) if self.shape.lane is None else ("v", value.vector)
            cpp, place = self._scratch_type(name), self._kept_place(name)
            emitter.line(f"pf::store{form}<{cpp}>({place}, {text});")

    def _fold(self, emitter: Emitter, m: Member, u: int) -> None:
        arguments = [emitter.value(m.loop.value).vector]
        if m.loop.kind.is_position:
            arguments.append(self._position(self.frame.place_type(m)))
        # Lanes that are separate rows may hold anything past the end, unless all are combined.
        is_partial = emitter.tail is not None and (not self.shape.is_vertical or m.role == Role.ALL)
        live = emitter.tail if is_partial else "1" if self.shape.lane is None else None
        method = "step" if live is None else "step_n"
        passed = ", ".join(arguments if live is None else [*arguments, live])
        emitter.line(f"{self._accumulator(m, u)}.{method}({passed});")

    def _position(self, kind: str) -> str:
        """The place of an element among those reduced."""
        text = self.frame.flat_column()
        if self.shape.is_vertical or self.shape.lane is None:
            return f"pf::splat({kind}({text}))"
        return f"pf::iota<{kind}>({text})"
