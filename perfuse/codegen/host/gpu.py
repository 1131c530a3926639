"""`generate_gpu_host`: the Plan's steps as one Python function that launches GPU kernels.

Names in the text, besides those of program.py: `G` the table of grids, `F` the segments. Small
temporaries lie in the arena of a frame, which belongs to one stream. Other memory comes from
PyTorch's allocator, in the order of the stream, and goes back after its last use.
Kernels between two calls are one segment, launched by one call: what dies inside a segment is used
again inside it, and where much memory dies, the segment ends.
"""

from __future__ import annotations

from typing import Any

import torch

from perfuse.codegen.host.guards import GuardRow
from perfuse.codegen.host.program import HostSource, HostWriter, symbols_in
from perfuse.codegen.host.storage import storage_inputs
from perfuse.codegen.host.tables import UNKNOWN, FillRow, GpuTables, KeptRow, LaunchRow
from perfuse.codegen.triton.sources import Launch, Scratch, TritonSources
from perfuse.ir.dtype import DType, to_torch
from perfuse.ir.index import Dim
from perfuse.ir.program import Buffer, LibraryCall, Opaque, View
from perfuse.schedule.memory import leading_inputs, num_bytes, touched
from perfuse.schedule.plan import Kernel, Plan
from perfuse.torch_compat import element_bytes


def generate_gpu_host(plan: Plan, sources: TritonSources, device: torch.device) -> HostSource:
    return _GpuWriter(plan, sources, device).run()


# Scratch of one kernel that shares a piece of memory starts at multiples of this.
ALIGNMENT = 256


def _num_bytes(scratch: Scratch) -> int:
    assert isinstance(scratch.size, int)
    return scratch.size * scratch.dtype.num_bytes


def _rounded_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _scoped(kernel: Kernel, scratch: str) -> str:
    """The host's name of a kernel's scratch: unique in the program."""
    return f"{kernel.name}_{scratch}"


def _renamed(kernel: Kernel, launches: tuple[Launch, ...]) -> dict[str, str]:
    return {s.name: _scoped(kernel, s.name) for launch in launches for s in launch.scratch}


def _leading(plan: Plan, sources: TritonSources) -> list[str]:
    """Inputs that some launch is passed, where there are many; first those promised aligned."""
    every = {b for launches in sources.launches for launch in launches for b in launch.buffers}
    found = [name for name in leading_inputs(plan) if name in every]
    aligned = _aligned(sources)
    return sorted(found, key=lambda name: name not in aligned)


def _aligned(sources: TritonSources) -> set[str]:
    """Buffers whose address some kernel is promised to be a multiple of 16."""
    kernels = {kernel.name: kernel for kernel in sources.kernels}
    found: set[str] = set()
    for launch in (launch for launches in sources.launches for launch in launches):
        kernel = kernels[launch.kernel]
        names = [name for name, _ in kernel.signature]
        pairs = zip(launch.buffers, names, strict=False)
        found |= {buffer for buffer, name in pairs if name in kernel.divisible}
    return found


def _pointers(plan: Plan, sources: TritonSources) -> tuple[str, ...]:
    """Everything that is passed by address, in order of first use."""
    found: dict[str, None] = dict.fromkeys(_leading(plan, sources))
    for kernel, launches in zip(plan.kernels, sources.launches, strict=True):
        names = _renamed(kernel, launches)
        for launch in launches:
            found |= dict.fromkeys(names.get(b, b) for b in launch.buffers)
            found |= dict.fromkeys(name for name, _ in launch.fills)
            found |= dict.fromkeys(names[s.name] for s in launch.scratch)
    return tuple(found)


def _symbols(sources: TritonSources) -> tuple[str, ...]:
    every = [s for launches in sources.launches for launch in launches for s in launch.symbols]
    return tuple(dict.fromkeys(every))


class _GpuWriter(HostWriter):
    """Writes the text and collects the rows of its tables."""

    allocator = "empty"

    def __init__(self, plan: Plan, sources: TritonSources, device: torch.device) -> None:
        super().__init__(plan, _pointers(plan, sources), _symbols(sources))
        self.sources = sources
        self.device = device
        self.leading = _leading(plan, sources)
        outputs: list[Any] = list(self.program.outputs)
        self.leaving |= {o.name for o in outputs if isinstance(o, Opaque)}
        self.seen_by_calls = self._seen_by_calls()
        self.aligned = _aligned(sources)
        self.records: list[LaunchRow | FillRow] = []
        self.segments: list[tuple[int, int]] = []
        self.kept: list[KeptRow] = []
        self.pending = 0  # records since the last launch call
        self.names: list[str] = []  # the kernels of these
        self.sizes_now: list[str] = []  # lines that fill G for the pending records
        self.spare: dict[str, int] = {}  # dead temporaries of the pending segment, their bytes
        self.made_as: dict[str, str] = {}  # whose tensor a buffer is that took over another's
        self.scratch_bytes: dict[str, int | None] = {}
        self.scratch_places: dict[int, int] = {}  # place in P -> byte offset in the arena
        self.scratch_guards: list[GuardRow] = []
        self.arena_bytes = _rounded_up(plan.arena_bytes)

    def _seen_by_calls(self) -> set[str]:
        calls = [step for step in self.plan.steps if isinstance(step, LibraryCall)]
        return {name for step in calls for name in touched(step)}

    def run(self) -> HostSource:
        w = self.w
        self._unpack()
        self._bind_sizes()
        w.line("stream = current_stream()")
        w.line("frame = take_frame(stream)")
        self._watch()
        w.line("P, F, T = frame.pointers, frame.segments, frame.windows")
        if self.sizes or self._has_unknown_grid():
            w.line("S, G = frame.sizes, frame.grids")
        self._fill_sizes()
        if self.leading:
            w.line(f"P[1:{len(self.leading) + 1}] = pointers")
        for name in list(self.places)[len(self.leading) :]:
            buffer = self.program.buffers.get(name)
            if buffer is not None and buffer.role == "constant":
                self._set_pointer(name)
            elif buffer is not None and buffer.role == "input":
                w.line(f"P[{self.places[name]}] = p{name}")
        self._steps()
        self._plain_results()
        if not self.plan.is_guarded:
            w.line("frame.home.append(frame)")
        w.line(f"return ({''.join(self._output(o) + ', ' for o in self.program.outputs)})")
        return HostSource(
            "def call(args):\n" + w.text(),
            len(self.places) + 1,
            len(self.sizes) + 1,
            self.arena_bytes,
            tuple(self.windows),
            (*self._fixed_pointers(), *self.scratch_places.items()),
            tuple(self.program.constants),
            len(self.program.inputs),
            (),
            tuple(dict.fromkeys(s.op for s in self.plan.steps if isinstance(s, LibraryCall))),
            self._tables(),
            (*self._guards(), *self.scratch_guards),
        )

    def _has_unknown_grid(self) -> bool:
        every = [launch for launches in self.sources.launches for launch in launches]
        dims = [d for launch in every for d in (*launch.grid, *(s.size for s in launch.scratch))]
        dims += [self.program.buffers[n].num_elements for launch in every for n, _ in launch.fills]
        return any(not isinstance(d, int) for d in dims)

    def _tables(self) -> GpuTables:
        written = {name for step in self.plan.steps for name in _written(step)}
        numbers = [k for k, name in enumerate(self.program.inputs) if name in written]
        return GpuTables(
            str(self.device),
            tuple(self.records),
            tuple(self.segments),
            tuple(self.kept),
            tuple(numbers),
            "memory_is_watched" if self.plan.is_guarded else _reason_unfit(self.plan),
            self._is_dynamic(),
        )

    def _is_dynamic(self) -> bool:
        buffers = [self.program.buffers.get(name) for name in self.program.inputs]
        dims = [d for b in buffers if b is not None for d in (*b.shape, *b.strides)]
        opaque = any(b is None for b in buffers)  # a size, or a tensor we know little of
        return opaque or any(not isinstance(d, int) for d in dims)

    def _unpack(self) -> None:
        names = list(self.program.inputs)
        if names:
            self.w.line(f"{', '.join(names)}{',' if len(names) == 1 else ''} = args")
        passed = [n for n in names if n in self.places and n in self.program.buffers]
        if self.leading:
            self.w.line(f"pointers = addresses([{', '.join(self.leading)}])")
            count = len(self.aligned & set(self.leading))
            if count:
                self.w.line(f"if are_misaligned(pointers, {count}): return realigned(args)")
        passed = [n for n in passed if n not in self.leading]
        for name in passed:
            self.w.line(f"p{name} = {name}.data_ptr()")
        promised = [n for n in passed if n in self.aligned]
        seen = storage_inputs(self.plan) - {n for step in self.plan.steps for n in _written(step)}
        for name in sorted(seen.intersection(promised)):
            # Kernels get an aligned copy; calls look at the storage of the input itself.
            self.w.line(f"if p{name} & 15: k{name} = aligned({name}); p{name} = k{name}.data_ptr()")
        promised = [n for n in promised if n not in seen]
        if promised:
            # A caller may pass a window that starts anywhere: nothing guards its address.
            either = " | ".join(f"p{name}" for name in promised)
            self.w.line(f"if ({either}) & 15: return realigned(args)")
        self.w.line("args.clear()")
        self.known_symbols |= {n for n in names if n not in self.program.buffers}

    def _needed_symbols(self) -> set[str]:
        every = [launch for launches in self.sources.launches for launch in launches]
        dims = [d for launch in every for d in (*launch.grid, *(s.size for s in launch.scratch))]
        return super()._needed_symbols() | {s for s in symbols_in(dims) if s[0] not in "uz"}

    # -- steps -----------------------------------------------------------------------------

    def _steps(self) -> None:
        launches = iter(self.sources.launches)
        number = -1
        for number, step in enumerate(self.plan.steps):
            if isinstance(step, LibraryCall):
                self._flush(number - 1)
                self.turns[number] = self.turn
                self._call(step)
                self.ready |= {o for o in step.outs if o and o not in self.program.buffers}
                self._release(number)
            else:
                self._kernel(step, next(launches), number)
        self._flush(number)

    def _kernel(self, kernel: Kernel, launches: tuple[Launch, ...], number: int) -> None:
        self.turns[number] = self.turn
        self.names.append(kernel.name)
        for name in sorted(touched(kernel)):
            self._allocate(name)
        self._scratch(kernel, launches, number)
        names = _renamed(kernel, launches)
        filled: set[str] = set()
        for launch in launches:
            for scratch in launch.scratch:
                is_new = scratch.name not in filled and not scratch.is_kept
                if is_new and scratch.fill is not None:
                    self._fill(names[scratch.name], scratch.dtype, scratch.fill, scratch.size)
                filled.add(scratch.name)
            for buffer, value in launch.fills:
                made = self.program.buffers[buffer]
                self._fill(buffer, made.dtype, value, made.num_elements)
            self._launch(launch, names)
        self._retire(number)

    def _launch(self, launch: Launch, names: dict[str, str]) -> None:
        self._grid(launch.grid)
        x, y, z = (n if isinstance(n, int) else UNKNOWN for n in launch.grid)
        pointers = tuple(self.places[names.get(b, b)] for b in launch.buffers)
        sizes = tuple(self.sizes.index(s) + 1 for s in launch.symbols)
        self.records.append(LaunchRow(launch.kernel, pointers, sizes, (x, y, z)))
        self.pending += 1

    def _fill(self, name: str, dtype: DType, value: int | float, count: Dim) -> None:
        self._grid((count,))
        known = count if isinstance(count, int) else UNKNOWN
        pattern = element_bytes(value, to_torch(dtype)).hex()
        self.records.append(FillRow(self.places[name], pattern, known))
        self.pending += 1

    def _grid(self, dims: tuple[Dim, ...]) -> None:
        first = 3 * len(self.records)
        for k, dim in enumerate(dims):
            if not isinstance(dim, int):
                self.sizes_now.append(f"G[{first + k}] = {self._dim(dim)}")

    def _scratch(self, kernel: Kernel, launches: tuple[Launch, ...], number: int) -> None:
        """Memory for what a kernel's launches need besides buffers; one piece where sizes allow."""
        every = {s.name: s for launch in launches for s in launch.scratch}
        for scratch in every.values():
            if scratch.is_kept:
                self._keep(_scoped(kernel, scratch.name), scratch)
        fresh = [s for s in every.values() if not s.is_kept]
        known = [s for s in fresh if isinstance(s.size, int)]
        if sum(_num_bytes(s) for s in known) <= self.plan.thresholds.gpu_scratch_bytes:
            self._place_scratch(kernel, known)
            fresh, known = [s for s in fresh if s not in known], []
        if len(known) > 1:
            self._one_piece(kernel, known, number)
        for scratch in fresh:
            if scratch not in known or len(known) == 1:
                name, size = _scoped(kernel, scratch.name), self._dim(scratch.size)
                bytes_known = _num_bytes(scratch) if scratch in known else None
                made = self._memory(name, f"({size},), (1,), {to_torch(scratch.dtype)}")
                self._own(name, made, bytes_known, number)
                self._set_pointer(name)

    def _place_scratch(self, kernel: Kernel, known: list[Scratch]) -> None:
        """After the arena, where the scratch of every kernel lies: they run one after another."""
        offset = _rounded_up(self.plan.arena_bytes)
        for scratch in known:
            name, size = _scoped(kernel, scratch.name), _num_bytes(scratch)
            self.scratch_places[self.places[name]] = offset
            if self.plan.is_guarded:
                kind, turn = str(to_torch(scratch.dtype)), self.turn
                self.scratch_guards.append(GuardRow(name, offset, size, kind, turn, turn))
                offset += ALIGNMENT  # a band
            offset += _rounded_up(size)
        self.arena_bytes = max(self.arena_bytes, offset)

    def _keep(self, name: str, scratch: Scratch) -> None:
        assert isinstance(scratch.size, int), "kept memory has a size known now"
        pattern = element_bytes(scratch.fill or 0, to_torch(scratch.dtype)).hex()
        self.kept.append(KeptRow(self.places[name], pattern, scratch.size))

    def _one_piece(self, kernel: Kernel, known: list[Scratch], number: int) -> None:
        offsets, total = [], 0
        for scratch in known:
            offsets.append(total)
            total += _rounded_up(_num_bytes(scratch))
        piece = _scoped(kernel, "scratch")
        self._own(piece, self._memory(piece, f"({total},), (1,), torch.uint8"), total, number)
        self.w.line(f"p = {piece}.data_ptr()")
        for scratch, offset in zip(known, offsets, strict=True):
            place = self.places[_scoped(kernel, scratch.name)]
            self.w.line(f"P[{place}] = p + {offset}" if offset else f"P[{place}] = p")

    def _own(self, name: str, made: str, num_bytes: int | None, number: int) -> None:
        """Memory that is needed by one step alone."""
        self.w.line(f"{name} = {made}")
        self.scratch_bytes[name] = num_bytes
        self.ready.add(name)
        self.last_use[name] = number

    # -- memory ----------------------------------------------------------------------------

    def _flush(self, number: int) -> None:
        """Launch what is pending, and give back what was needed last by the steps so far."""
        if self.pending:
            for line in self.sizes_now:
                self.w.line(line)
            line = f"if code := launch(F[{len(self.segments)}], stream): failed(code)"
            self._turn(line, ", ".join(self.names))
            self.names.clear()
            self.segments.append((len(self.records) - self.pending, self.pending))
            self.pending = 0
            self.sizes_now.clear()
        self.spare.clear()
        self._release(number)

    def _retire(self, number: int) -> None:
        """After a kernel: end the segment where much memory dies, else keep it for the next."""
        alive = (self.ready | self.held) - self.leaving
        dying = [n for n in sorted(alive) if self.last_use.get(n) == number]
        sizes = {name: self._bytes(name) for name in dying}
        known = sum(filter(None, sizes.values()))
        # Giving much memory back is worth a launch call of its own (about a microsecond).
        if None in sizes.values() or known >= self.plan.thresholds.gpu_release_bytes:
            self._flush(number)
        else:
            ours = {n for n in dying if n in self.program.buffers}
            temps = {n for n in ours if self.program.buffers[n].role == "temp"}
            self.spare |= {n: size for n, size in sizes.items() if n in temps and size}

    def _bytes(self, name: str) -> int | None:
        if name in self.scratch_bytes:
            return self.scratch_bytes[name]
        buffer = self.program.buffers.get(name)
        return num_bytes(buffer) if buffer is not None else 0

    def _allocate(self, name: str) -> None:
        buffer = self.program.buffers[name]
        is_new = name not in self.ready and name not in self.plan.places
        found = self._spare_for(buffer) if is_new else None
        if found is None:
            super()._allocate(name)
            return
        del self.spare[found]
        self.made_as[name] = self.made_as.get(found, found)
        self.w.line(f"{name} = {found}")
        self.w.line(f"P[{self.places[name]}] = P[{self.places[found]}]")
        self.ready.add(name)

    def _spare_for(self, buffer: Buffer) -> str | None:
        """A dead temporary of the pending segment whose memory serves for this buffer."""
        if buffer.role != "temp" or buffer.name not in self.places:
            return None
        size = num_bytes(buffer)
        is_private = buffer.name not in self.seen_by_calls | self.leaving
        for name, spare in self.spare.items():
            old = self.program.buffers[self.made_as.get(name, name)]
            same = (old.dtype, old.shape, old.strides) == (
                buffer.dtype,
                buffer.shape,
                buffer.strides,
            )
            if spare == size and (is_private or same):
                return name
        return None

    def _adopt(self, name: str) -> None:
        super()._adopt(name)
        if name in self.aligned:
            place = f"P[{self.places[name]}]"
            # What is not written stays itself: a result may be a view of an input, at its offset.
            is_written = any(name in _written(step) for step in self.plan.steps)
            copy = name if is_written else f"k{name}"
            moved = f"{copy} = aligned({name}); {place} = {copy}.data_ptr()"
            self.w.line(f"if {place} & 15: {moved}")


def _written(step: Kernel | LibraryCall) -> set[str]:
    return set(step.mutates) if isinstance(step, LibraryCall) else set(step.stored)


# Calls that wait for the GPU, or whose work depends on what is in it.
_WAITING = (
    "nonzero", "_local_scalar_dense", "item", "masked_select", "unique", "repeat_interleave",
    "bincount", "histc", "equal", "is_nonzero", "_assert_async", "linalg_", "multinomial",
)  # fmt: skip


def _reason_unfit(plan: Plan) -> str:
    """Why a program cannot be recorded once and replayed, in a word; nothing where it can."""
    program = plan.program
    outputs: list[Any] = list(program.outputs)
    windows = [o.buffer for o in outputs if isinstance(o, View)]
    if any(program.buffers[name].role == "input" for name in windows):
        return "result_is_an_input"
    if any(isinstance(o, Opaque) and o.name in program.inputs for o in outputs):
        return "result_is_an_input"
    if storage_inputs(plan):
        return "call_looks_at_storage"
    for step in plan.steps:
        if not isinstance(step, LibraryCall):
            continue
        name = step.op.split(".")[1] if "." in step.op else step.op
        if step.op.startswith("py:") or name.startswith(_WAITING):
            return f"call_of_{name.removeprefix('py:')}"
        if any(o not in program.buffers and o.startswith("u") for o in step.makes()):
            return "size_depends_on_data"
        if _moves_to_host(step):
            return "copy_between_devices"
    return ""


def _moves_to_host(step: LibraryCall) -> bool:
    devices = [v for k, v in step.kwargs if k == "device" and isinstance(v, torch.device)]
    return any(device.type == "cpu" for device in devices) or (
        step.op.startswith("aten._to_copy") and bool(devices)
    )
