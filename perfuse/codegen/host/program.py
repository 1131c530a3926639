"""`generate_host`: the Plan's steps as one straight-line Python function.

Names in the text: `i*` inputs, `b*` buffers, `v*` carried values, `P` the pointer table, `S` the
size table, `T` windows prepared once per frame. A frame is everything that one call at a time may
use: tables, arena, windows; calls that overlap take different frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from perfuse.codegen.cpp.unit import CppSources, Segment
from perfuse.codegen.host.guards import WatchedMemory
from perfuse.codegen.host.source import ArenaWindow, HostSource, function_name
from perfuse.codegen.host.storage import views_from_calls
from perfuse.codegen.host.tables import GpuTables
from perfuse.errors import SpecError
from perfuse.ir import index as ix
from perfuse.ir.atoms import Atom, Division, Indirect, Quotient, Symbol
from perfuse.ir.dtype import to_torch
from perfuse.ir.index import Dim, Index
from perfuse.ir.program import ARGUMENTS, Buffer, BufferKind, LibraryCall, Loop, Opaque, View
from perfuse.schedule.allocate import leaving_names, seen_by_calls
from perfuse.schedule.arena import leading_inputs, num_bytes
from perfuse.schedule.plan import Kernel, Plan, Step
from perfuse.schedule.turns import Allocation, MemorySource
from perfuse.torch_compat.ops import HigherOrderOperator, OpOverload


def generate_host(plan: Plan, sources: CppSources, keeps_frames: bool = True) -> HostSource:
    """The host program; a frame that is not reused frees its arena when the call ends."""
    return _CpuWriter(plan, sources, keeps_frames).run()


class HostWriter(WatchedMemory):
    """The parts that host programs of every device share: entry, calls, views of memory."""

    def __init__(self, plan: Plan, pointers: tuple[str, ...], sizes: tuple[str, ...]) -> None:
        super().__init__(plan)
        self.program = plan.program
        self.sizes = sizes
        self.places = {name: k + 1 for k, name in enumerate(pointers)}
        self.windows: dict[ArenaWindow, int] = {}
        self.given, self.own_views = views_from_calls(plan)
        self.with_layout = leaving_names(plan) | seen_by_calls(plan)
        self.layouts: dict[str, Buffer] = {}  # of tensors that have that of an earlier owner
        self.known_symbols: set[str] = set()

    # -- entry -----------------------------------------------------------------------------

    def _unpack(self) -> None:
        names = list(self.program.inputs)
        if names:
            self.w.line(f"{', '.join(names)}{',' if len(names) == 1 else ''} = args")
        self.w.line("args.clear()")
        self.known_symbols |= {n for n in names if n not in self.program.buffers}

    def _bind_sizes(self) -> None:
        """Sizes that are not arguments are read from the shapes of the arguments."""
        unknown = self._needed_symbols() - self.known_symbols
        while found := [(s, text) for s in sorted(unknown) if (text := self._find_symbol(s))]:
            for symbol, text in found:
                self.w.line(f"{symbol} = {text}")
            self.known_symbols |= {symbol for symbol, _ in found}
            unknown -= self.known_symbols
        for name, formula in self.program.symbols:
            self.w.line(f"{name} = {formula}")
            self.known_symbols.add(name)
        calls = [step for step in self.plan.steps if isinstance(step, LibraryCall)]
        unset = {*self.sizes} - self.known_symbols - {n for call in calls for n in call.makes()}
        if unset:  # kernels would read what an earlier call has left there
            raise SpecError(f"no argument or call gives the sizes {', '.join(sorted(unset))}")

    def _fill_sizes(self) -> None:
        """Put the sizes that are known at entry into their table."""
        for symbol in self.sizes:
            if symbol in self.known_symbols:
                self._set_size(symbol)

    def _set_size(self, symbol: str) -> None:
        self.w.line(f"S[{self.sizes.index(symbol) + 1}] = {symbol}")

    def _needed_symbols(self) -> set[str]:
        dims: list[Any] = []
        for buffer in self.program.buffers.values():
            dims += [*buffer.shape, *buffer.strides]
        calls = [step for step in self.plan.steps if isinstance(step, LibraryCall)]
        for leaf in (leaf for call in calls for leaf in call.leaves()):
            is_view = isinstance(leaf, View)
            dims += [*leaf.shape, *leaf.strides, leaf.offset] if is_view else [leaf]
        dims += list(self.program.outputs)
        found = symbols_in(dims) | set(self.sizes)
        return found - {name for name, _ in self.program.symbols}

    def _find_symbol(self, symbol: str) -> str | None:
        """The argument dimension that gives a symbol: a size equal to it, or a sum with it."""
        places = [
            (f"{name}.{what}({axis})", dim)
            for name in self.program.inputs
            if (buffer := self.program.buffers.get(name)) is not None
            for what, dims in (("size", buffer.shape), ("stride", buffer.strides))
            for axis, dim in enumerate(dims)
        ]
        known = ((place, self._rest_of(dim, symbol)) for place, dim in places)
        found = [(place, rest) for place, rest in known if rest is not None]
        if not found:
            return None
        place, rest = min(found, key=lambda entry: entry[1] != 0)
        return place if rest == 0 else f"{place} - ({self._dim(rest)})"

    def _rest_of(self, dim: Dim, symbol: str) -> Dim | None:
        """The rest of `symbol + rest`, if all of it is known."""
        atoms = [a for a in ix.atoms_of(dim) if isinstance(a, Symbol)]
        named = [a for a in atoms if a.name == symbol]
        if not named or ix.coefficient_of(dim, named[0]) != 1:
            return None
        rest = ix.add(dim, -1 * ix.symbol(symbol, named[0].lower, named[0].is_from_data))
        return rest if symbols_in([rest]) <= self.known_symbols else None

    # -- steps -----------------------------------------------------------------------------

    def _release(self, names: Iterable[str]) -> None:
        """Drop tensors, so that their memory can be reused."""
        gone = ", ".join(names)
        if gone:
            self.w.line(f"del {gone}")

    def _allocate(self, allocations: Iterable[Allocation]) -> None:
        """Write what the plan decided; arenas are placed before, calls return their results."""
        for made in allocations:
            if made.source in (MemorySource.NEW, MemorySource.REUSED):
                self.w.line(f"{made.name} = {self._source(made)}")
            if made.source not in (MemorySource.ARENA, MemorySource.CALL):
                self._point(made)

    def _point(self, made: Allocation) -> None:
        if made.name in self.places:
            self._set_pointer(made.name)

    def _source(self, made: Allocation) -> str:
        buffer = self.program.buffers[made.name]
        if made.source is MemorySource.REUSED:
            return self._reused(buffer, made.of)
        if buffer.kind == BufferKind.SEEDS:
            return f"new_seeds({self._dim(buffer.shape[0])})"
        return self._empty(buffer)

    def _reused(self, buffer: Buffer, of: str) -> str:
        """The tensor that was there, in the layout of a buffer that calls or the caller see."""
        old, name = self.layouts.get(of, self.program.buffers[of]), buffer.name
        has_layout = (old.shape, old.strides) == (buffer.shape, buffer.strides)
        if has_layout or name not in self.with_layout:
            self.layouts[name] = old
            return of
        self.own_views |= {name} & self.leaving
        return f"as_strided({of}, {self._dims(buffer.shape)}, {self._dims(buffer.strides)})"

    def _empty(self, buffer: Buffer) -> str:
        dims = f"{self._dims(buffer.shape)}, {self._dims(buffer.strides)}"
        layout = f"{dims}, {to_torch(buffer.dtype)}"
        return self._memory(buffer.name, layout, num_bytes(buffer))

    def _set_pointer(self, name: str) -> None:
        self.w.line(f"P[{self.places[name]}] = {name}.data_ptr()")

    def _call(self, step: LibraryCall) -> None:
        args = [self._argument(a) for a in step.args]
        args += [f"{k}={self._argument(v)}" for k, v in step.kwargs]
        if step.into_out:
            (name,) = step.outs
            assert name is not None
            out = self._whole(name) if step.window is None else self._view(step.window)
            line = f"{function_name(step.op)}({', '.join([*args, f'out={out}'])})"
            self._run(line, step.op)
            return
        names = [o or "_" for o in step.outs]
        left = f"{', '.join(names)}{',' if step.returns_list and len(names) == 1 else ''}"
        copied = [name for name in step.outs if name and step.returns_view]
        self._run(f"{left} = {function_name(step.op)}({', '.join(args)})", step.op, copied)
        for size in step.new_sizes:
            self.w.line(f"{size.symbol} = {size.text}")
        for name in step.outs:
            if name is not None and name in self.program.buffers:
                self._adopt(name)
        for symbol in step.makes():
            if symbol in self.sizes:
                self._set_size(symbol)

    def _adopt(self, name: str) -> None:
        """A tensor that ATen allocated: kernels rely on the strides it was traced with."""
        buffer = self.program.buffers[name]
        if buffer.shape:
            self.w.line(f"{name} = with_strides({name}, {self._dims(buffer.strides)})")
        if name in self.places:
            self._set_pointer(name)

    # -- values ----------------------------------------------------------------------------

    def _dim(self, dim: Dim) -> str:
        return ix.render(dim, self._atom)

    def _atom(self, atom: Atom) -> str:
        if isinstance(atom, Symbol):
            return atom.name
        assert isinstance(atom, Division), f"{atom} is known in kernels alone"
        a, b = map(self._dim, atom.operands)
        return f"(({a}) {'//' if isinstance(atom, Quotient) else '%'} ({b}))"

    def _dims(self, dims: tuple[Dim, ...]) -> str:
        inner = ", ".join(self._dim(d) for d in dims)
        return f"({inner},)" if len(dims) == 1 else f"({inner})"

    def _argument(self, value: Any) -> str:
        if isinstance(value, View):
            return self._view(value)
        if isinstance(value, Opaque):
            return value.name
        if isinstance(value, Index):
            return self._dim(value)
        if isinstance(value, list | tuple):
            inner = ", ".join(self._argument(v) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * bool(value)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._argument(v)}" for k, v in value.items()) + "}"
        return spell_python(value)

    def _whole(self, name: str) -> str:
        buffer = self.program.buffers[name]
        return self._view(View(name, buffer.shape, buffer.strides, 0))

    def _view(self, view: View) -> str:
        buffer = self.program.buffers[view.buffer]
        if view.buffer in self.plan.places:
            return self._arena_view(view, buffer)
        if _is_whole(view, buffer):
            return view.buffer
        if _is_transpose(view, buffer):
            return f"{view.buffer}.t()"
        if _is_expanded(view, buffer):
            return f"{view.buffer}.expand({self._dims(view.shape)})"
        return self._strided(view.buffer, view)

    def _strided(self, base: str, view: View) -> str:
        offset = "" if view.offset == 0 else f" + {self._dim(view.offset)}"
        return (
            f"as_strided({base}, {self._dims(view.shape)}, {self._dims(view.strides)}, "
            f"{base}.storage_offset(){offset})"
        )

    def _arena_view(self, view: View, buffer: Buffer) -> str:
        """A tensor created once; if only the call knows its size, a view of one."""
        if all(isinstance(d, int) for d in (view.offset, *view.shape, *view.strides)):
            return self._window(view, buffer)
        whole = View(view.buffer, buffer.shape, buffer.strides, 0)
        if not all(isinstance(stride, int) for stride in buffer.strides):  # of no use for so few
            whole = View(view.buffer, (buffer.num_elements,), (1,), 0)
        return self._strided(self._window(whole, buffer), view)

    def _window(self, view: View, buffer: Buffer) -> str:
        offset, shape, strides = map(_known, ((view.offset,), view.shape, view.strides))
        start = self.plan.places[view.buffer] + offset[0] * buffer.dtype.num_bytes
        made = ArenaWindow(start, str(to_torch(buffer.dtype)), shape, strides)
        return f"T[{self.windows.setdefault(made, len(self.windows))}]"

    def _fixed_pointers(self) -> tuple[tuple[int, int], ...]:
        """Places in P of what is in the arena, with its byte offset there."""
        every = ((place, self.plan.places.get(name)) for name, place in self.places.items())
        return tuple((place, offset) for place, offset in every if offset is not None)

    def _results(self) -> None:
        self._allocate(self.plan.memory.at_exit)
        self._own_memory(made.name for made in self.plan.memory.at_exit)
        self.w.line(f"return ({''.join(self._output(o) + ', ' for o in self.program.outputs)})")

    def _host_source(
        self, segments: tuple[str, ...] = (), gpu: GpuTables | None = None
    ) -> HostSource:
        return HostSource(
            text="def call(args):\n" + self.w.text(),
            num_pointers=len(self.places) + 1,
            num_sizes=len(self.sizes) + 1,
            arena_bytes=self.plan.memory.arena_bytes,
            windows=tuple(self.windows),
            fixed_pointers=self._fixed_pointers(),
            constants=tuple(self.program.constants),
            num_inputs=len(self.program.inputs),
            segments=segments,
            ops=tuple(dict.fromkeys(s.op for s in self.plan.steps if isinstance(s, LibraryCall))),
            gpu=gpu,
            guards=self._guards(),
        )

    def _output(self, value: Any) -> str:
        """A result. Windows on the program's own memory are not views in the sense of autograd.

        AOTAutograd would replay them on a base that only the program knows, and writing to a view
        that was made with gradients off is an error once they are on. `detach` shares the version.
        """
        text = self._argument(value)
        name = value.buffer if isinstance(value, View) else text
        is_view = name in self.own_views or (isinstance(value, View) and text != name)
        return f"{text}.detach()" if is_view and name not in self.given else text


class _CpuWriter(HostWriter):
    """Segments of C++ kernels over tables, with temporaries in the arena of a frame."""

    def __init__(self, plan: Plan, sources: CppSources, keeps_frames: bool) -> None:
        super().__init__(plan, sources.pointers, sources.sizes)
        self.sources = sources
        self.keeps_frames = keeps_frames and not plan.is_guarded  # guarded memory moves every call

    def run(self) -> HostSource:
        w = self.w
        self._unpack()
        self._bind_sizes()
        w.line("frame = take_frame()")
        self._watch()
        w.line("P, S, T = frame.pointers, frame.sizes, frame.windows")
        w.line("S[0] = get_num_threads()")
        self._fill_sizes()
        leading = leading_inputs(self.plan)
        if leading:
            w.line(f"P[1:{len(leading) + 1}] = addresses([{', '.join(leading)}])")
        for name in self.sources.pointers[len(leading) :]:
            if self.program.buffers[name].kind in ARGUMENTS:
                self._set_pointer(name)
        self._steps()
        self._plain_results()
        if self.keeps_frames:
            w.line("frames.append(frame)")
        self._results()
        segments = [step.name for step in self.sources.steps if isinstance(step, Segment)]
        return self._host_source(tuple(segments))

    def _steps(self) -> None:
        turns = self.plan.memory.turns
        for number, (turn, step) in enumerate(zip(turns, self.sources.steps, strict=True)):
            self.turn = number
            for added in turn.allocated:
                self._allocate(added)
            if isinstance(step, Segment):
                self._segment(step, [self.plan.steps[number] for number in turn.numbers])
            else:
                self._call(step)
            if turn is not turns[-1]:  # else all of them are freed when the function returns
                self._release(turn.freed)

    def _segment(self, segment: Segment, steps: Sequence[Step]) -> None:
        line = f"{segment.name}(frame.pointers_at, frame.sizes_at)"
        self._run(line, ", ".join(segment.kernels))
        if segment.checks_indices:
            sizes = self._dims(_checked_sizes(steps))
            self.w.line(f"if frame.status[0]: bad_index(frame, {_origins(steps)!r}, {sizes})")


def _origins(steps: Sequence[Step]) -> str:
    """The user's lines of loops with data-dependent indices."""
    loops = [m.loop for step in steps if isinstance(step, Kernel) for m in step.members]
    lines = [loop.origin.line for loop in loops if loop.origin.line and _lookups(loop)]
    return ", ".join(dict.fromkeys(lines))


def _lookups(loop: Loop) -> list[Indirect]:
    """The indices of a loop that are read from data."""
    indices = [*(read.index for read in loop.reads()), loop.index]
    return [atom for at in indices for atom in ix.atoms_of(at) if isinstance(atom, Indirect)]


def _checked_sizes(steps: Sequence[Step]) -> tuple[Dim, ...]:
    """The sizes that indices read from data are checked against."""
    loops = [m.loop for step in steps if isinstance(step, Kernel) for m in step.members]
    atoms = [atom for loop in loops for atom in _lookups(loop)]
    return tuple(dict.fromkeys(atom.size for atom in sorted(atoms, key=lambda a: a.sort_key)))


def _known(dims: tuple[Dim, ...]) -> tuple[int, ...]:
    ints = tuple(d for d in dims if isinstance(d, int))
    assert len(ints) == len(dims), "arena buffers have known sizes"
    return ints


def symbols_in(dims: list[Any]) -> set[str]:
    """The size symbols in these."""
    indices = [d for d in dims if isinstance(d, Index)]
    return {a.name for d in indices for a in ix.atoms_of(d) if isinstance(a, Symbol)}


def _is_whole(view: View, buffer: Buffer) -> bool:
    if view.offset != 0 or view.shape != buffer.shape:
        return False
    return all(
        n == 1 or a == b for n, a, b in zip(view.shape, view.strides, buffer.strides, strict=True)
    )


def _is_expanded(view: View, buffer: Buffer) -> bool:
    """Repeated along new leading dimensions: an expand for autograd, not strides."""
    lead = len(view.shape) - len(buffer.shape)
    if lead <= 0 or view.offset != 0 or any(stride != 0 for stride in view.strides[:lead]):
        return False
    return view.shape[lead:] == buffer.shape and view.strides[lead:] == buffer.strides


def _is_transpose(view: View, buffer: Buffer) -> bool:
    turned = (buffer.shape[::-1], buffer.strides[::-1], 0)
    return len(buffer.shape) == 2 and (view.shape, view.strides, view.offset) == turned


def spell_python(value: Any) -> str:
    """A plain value as Python text that evaluates to it again."""
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if value is None or isinstance(value, bool | int | str | complex):
        return repr(value)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, OpOverload):
        return f"torch.ops.{value}"
    if isinstance(value, HigherOrderOperator):
        return f"torch.ops.higher_order.{value}"
    raise ValueError(f"no Python text for {value!r} of type {type(value).__name__}")
