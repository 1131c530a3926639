"""`generate_gpu_host`: the Plan's steps as one Python function that launches GPU kernels.

Names in the text, besides those of program.py: `G` the table of grids, `F` the segments. Small
temporaries are in the arena of a frame, which belongs to one stream. Other memory comes from
PyTorch's allocator, in the order of the stream. A turn of kernels is one segment, launched by one
call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from perfuse.codegen.host.program import HostWriter, symbols_in
from perfuse.codegen.host.source import GuardRow, HostSource
from perfuse.codegen.host.storage import storage_inputs
from perfuse.codegen.host.tables import (
    UNKNOWN,
    FillRow,
    GpuTables,
    HostCallRow,
    KeptRow,
    LaunchRow,
    MappedLaunchRow,
    Record,
)
from perfuse.codegen.triton.sources import Launch, TensorMap, TritonSources
from perfuse.ir.dtype import to_torch
from perfuse.ir.index import Dim
from perfuse.ir.program import BufferKind, LibraryCall, Opaque, View, sizes_from_data
from perfuse.schedule.allocate import scratch_name, with_memory
from perfuse.schedule.arena import leading_inputs
from perfuse.schedule.plan import Kernel, Plan
from perfuse.schedule.turns import Allocation, MemorySource, Scratch
from perfuse.schedule.verify_memory import verify_memory
from perfuse.torch_compat.tensors import element_bytes


def generate_gpu_host(plan: Plan, sources: TritonSources, device: torch.device) -> HostSource:
    """The host program; the memory of the plan is decided with the scratch that sources need."""
    plan = with_memory(plan, is_gpu=True, scratch=_scratch_of(plan, sources))
    verify_memory(plan)  # always: a mistake here would silently change values
    return _GpuWriter(plan, sources, device).run()


def _scratch_of(plan: Plan, sources: TritonSources) -> dict[str, tuple[Scratch, ...]]:
    """The scratch of each kernel that needs some."""
    every = zip(plan.kernels, sources.launches, strict=True)
    found = {k.name: {s.name: s for each in runs for s in each.scratch} for k, runs in every}
    return {name: tuple(scratch.values()) for name, scratch in found.items() if scratch}


def _renamed(kernel: Kernel, launches: tuple[Launch, ...]) -> dict[str, str]:
    return {s.name: scratch_name(kernel, s.name) for launch in launches for s in launch.scratch}


def _leading(plan: Plan, sources: TritonSources) -> list[str]:
    """Inputs that are passed to some launch, if there are many; those assumed aligned first."""
    every = {b for launch in sources.all_launches for b in launch.passed}
    found = [name for name in leading_inputs(plan) if name in every]
    aligned = _aligned(sources)
    return sorted(found, key=lambda name: name not in aligned)


def _aligned(sources: TritonSources) -> set[str]:
    """Buffers whose address some kernel assumes to be a multiple of 16."""
    kernels = {kernel.name: kernel for kernel in sources.kernels}
    found: set[str] = set()
    for launch in sources.all_launches:
        if launch.call is not None:  # it reads vectors of up to 16 bytes
            found |= set(launch.buffers)
            continue
        kernel = kernels[launch.kernel]
        names = [name for name, _ in kernel.signature]
        pairs = zip(launch.buffers, names, strict=False)
        found |= {buffer for buffer, name in pairs if name in kernel.divisible}
        found |= {made.buffer for made in launch.maps}
    return found


def _pointers(plan: Plan, sources: TritonSources) -> tuple[str, ...]:
    """Everything that is passed by address, in order of first use."""
    found: dict[str, None] = dict.fromkeys(_leading(plan, sources))
    for kernel, launches in zip(plan.kernels, sources.launches, strict=True):
        names = _renamed(kernel, launches)
        for launch in launches:
            found |= dict.fromkeys(names.get(b, b) for b in launch.passed)
            found |= dict.fromkeys(names[s.name] for s in launch.scratch)
    return tuple(found)


class _GpuWriter(HostWriter):
    """Writes the text and collects the rows of its tables."""

    allocator = small_allocator = "empty"

    def __init__(self, plan: Plan, sources: TritonSources, device: torch.device) -> None:
        symbols = dict.fromkeys(s for launch in sources.all_launches for s in launch.symbols)
        super().__init__(plan, _pointers(plan, sources), tuple(symbols))
        self.sources = sources
        self.device = device
        self.leading = _leading(plan, sources)
        self.aligned = _aligned(sources)
        scratch = [s for launch in sources.all_launches for s in launch.scratch]
        grids = [dim for launch in sources.all_launches for dim in launch.grid]
        self.launch_dims = (*grids, *(s.size for s in scratch))
        self.written = {name for step in plan.steps for name in _written(step)}
        self.records: list[Record] = []
        self.segments: list[tuple[int, int]] = []
        self.kept: list[KeptRow] = []
        self.sizes_now: list[str] = []  # lines that fill G for the records of the turn
        every = zip(plan.kernels, sources.launches, strict=True)
        each = ((k, s) for k, runs in every for launch in runs for s in launch.scratch)
        self.scratch = {scratch_name(kernel, s.name): s for kernel, s in each}

    def run(self) -> HostSource:
        w = self.w
        self._unpack()
        self._bind_sizes()
        w.line("stream = current_stream()")
        w.line("frame = take_frame(stream)")
        self._watch()
        w.line("P, F, T = frame.pointers, frame.segments, frame.windows")
        if self.sizes or not all(isinstance(dim, int) for dim in self.launch_dims):
            w.line("S, G = frame.sizes, frame.grids")
        self._fill_sizes()
        if self.leading:
            w.line(f"P[1:{len(self.leading) + 1}] = pointers")
        for name in list(self.places)[len(self.leading) :]:
            buffer = self.program.buffers.get(name)
            if buffer is not None and buffer.kind == BufferKind.CONSTANT:
                self._set_pointer(name)
            elif buffer is not None and buffer.kind == BufferKind.INPUT:
                w.line(f"P[{self.places[name]}] = p{name}")
        self._steps()
        self._plain_results()
        if not self.plan.is_guarded:
            w.line("frame.home.append(frame)")
        self._results()
        return self._host_source(gpu=self._tables())

    def _tables(self) -> GpuTables:
        numbers = [k for k, name in enumerate(self.program.inputs) if name in self.written]
        return GpuTables(
            device=str(self.device),
            records=tuple(self.records),
            segments=tuple(self.segments),
            kept=tuple(self.kept),
            written=tuple(numbers),
            unfit="memory_is_watched" if self.plan.is_guarded else _reason_unfit(self.plan),
            is_dynamic=self._is_dynamic(),
        )

    def _is_dynamic(self) -> bool:
        buffers = [self.program.buffers.get(name) for name in self.program.inputs]
        dims = [d for b in buffers if b is not None for d in (*b.shape, *b.strides)]
        opaque = any(b is None for b in buffers)  # a size, or a tensor about which little is known
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
        seen = storage_inputs(self.plan) - self.written
        for name in sorted(seen.intersection(promised)):
            # Kernels get an aligned copy; library calls use the storage of the input itself.
            self.w.line(f"if p{name} & 15: k{name} = aligned({name}); p{name} = k{name}.data_ptr()")
        promised = [n for n in promised if n not in seen]
        if promised:
            # A caller may pass a view that starts anywhere: nothing guards its address.
            either = " | ".join(f"p{name}" for name in promised)
            self.w.line(f"if ({either}) & 15: return realigned(args)")
        self.w.line("args.clear()")
        self.known_symbols |= {n for n in names if n not in self.program.buffers}

    def _needed_symbols(self) -> set[str]:
        known = {*sizes_from_data(self.launch_dims), *dict(self.program.symbols)}
        return super()._needed_symbols() | (symbols_in(list(self.launch_dims)) - known)

    # -- steps -----------------------------------------------------------------------------

    def _steps(self) -> None:
        memory, launches = self.plan.memory, iter(self.sources.launches)
        self._release(memory.freed_at_entry)
        for self.turn, turn in enumerate(memory.turns):
            names: list[str] = []
            first = len(self.records)
            for number, added in zip(turn.numbers, turn.allocated, strict=True):
                step = self.plan.steps[number]
                self._allocate(added)
                if isinstance(step, LibraryCall):
                    self._call(step)
                else:
                    self._kernel(step, next(launches))
                    names.append(step.name)
            self._segment(first, names)
            self._release(turn.freed)

    def _segment(self, first: int, names: list[str]) -> None:
        """Launch the records from `first` on; a kernel of no elements has none."""
        if len(self.records) > first:
            for line in self.sizes_now:
                self.w.line(line)
            line = f"if code := launch(F[{len(self.segments)}], stream): failed(code)"
            self._run(line, ", ".join(names))
            self.segments.append((first, len(self.records) - first))
            self.sizes_now.clear()

    def _kernel(self, kernel: Kernel, launches: tuple[Launch, ...]) -> None:
        names = _renamed(kernel, launches)
        filled: set[str] = set()
        for launch in launches:
            for scratch in launch.scratch:
                if scratch.name not in filled:
                    self._prepare(names[scratch.name], scratch)
                filled.add(scratch.name)
            self._launch(launch, names)

    def _prepare(self, name: str, scratch: Scratch) -> None:
        """Fill scratch: before each launch, or once if it is persistent."""
        value = scratch.fill or 0 if scratch.is_kept else scratch.fill
        if value is None:
            return
        pattern = element_bytes(value, to_torch(scratch.dtype)).hex()
        if scratch.is_kept:
            assert isinstance(scratch.size, int), "kept memory has a size known now"
            self.kept.append(KeptRow(self.places[name], pattern, scratch.size))
            return
        self._grid((scratch.size,))
        known = scratch.size if isinstance(scratch.size, int) else UNKNOWN
        self.records.append(FillRow(self.places[name], pattern, known))

    def _launch(self, launch: Launch, names: dict[str, str]) -> None:
        self._grid(launch.grid)
        x, y, z = (n if isinstance(n, int) else UNKNOWN for n in launch.grid)
        pointers = tuple(self.places[names.get(b, b)] for b in launch.buffers)
        if launch.call is not None:
            call = launch.call
            row = HostCallRow(launch.kernel, pointers, call.offsets, call.sizes, call.factors)
            self.records.append(row)
            return
        sizes = tuple(self.sizes.index(s) + 1 for s in launch.symbols)
        passed = (launch.kernel, pointers, sizes, (x, y, z))
        maps = tuple(map(self._map, launch.maps))
        self.records.append(MappedLaunchRow(*passed, maps) if maps else LaunchRow(*passed))

    def _map(self, made: TensorMap) -> tuple[int, ...]:
        width = made.dtype.num_bytes
        start = (self.places[made.buffer], made.offset * width, width)
        return (*start, *made.shape, made.stride * width, *made.copied)

    def _grid(self, dims: tuple[Dim, ...]) -> None:
        first = 3 * len(self.records)
        for k, dim in enumerate(dims):
            if not isinstance(dim, int):
                self.sizes_now.append(f"G[{first + k}] = {self._dim(dim)}")

    # -- memory ----------------------------------------------------------------------------

    def _source(self, made: Allocation) -> str:
        if made.name in self.program.buffers:
            return super()._source(made)
        scratch = self.scratch.get(made.name)
        if scratch is None:  # a piece for several
            return self._memory(made.name, f"({made.num_bytes},), (1,), torch.uint8")
        size = self._dim(scratch.size)
        return self._memory(made.name, f"({size},), (1,), {to_torch(scratch.dtype)}")

    def _point(self, made: Allocation) -> None:
        place = self.places.get(made.name)
        if made.source is MemorySource.PART:
            self.w.line(f"P[{place}] = p + {made.offset}" if made.offset else f"P[{place}] = p")
        elif made.source is MemorySource.REUSED and place is not None and made.of in self.places:
            self.w.line(f"P[{place}] = P[{self.places[made.of]}]")
        elif place is None and made.name not in self.program.buffers:
            self.w.line(f"p = {made.name}.data_ptr()")
        else:
            super()._point(made)

    def _scratch_in_arena(self) -> Iterator[tuple[Allocation, int]]:
        """The scratch that is in the arena, with the turn of its kernel."""
        for number, turn in enumerate(self.plan.memory.turns):
            for made in (made for added in turn.allocated for made in added):
                if made.source is MemorySource.ARENA and made.name in self.scratch:
                    yield made, number

    def _fixed_pointers(self) -> tuple[tuple[int, int], ...]:
        scratch = ((self.places[made.name], made.offset) for made, _ in self._scratch_in_arena())
        return (*super()._fixed_pointers(), *scratch)

    def _guards(self) -> tuple[GuardRow, ...]:
        rows = [*super()._guards()]
        for made, turn in self._scratch_in_arena() if self.plan.is_guarded else ():
            kind, size = str(to_torch(self.scratch[made.name].dtype)), made.num_bytes or 0
            rows.append(GuardRow(made.name, made.offset, size, kind, turn, turn))
        return tuple(rows)

    def _adopt(self, name: str) -> None:
        super()._adopt(name)
        if name in self.aligned:
            place = f"P[{self.places[name]}]"
            # What is not written is not moved: a result may be a view of an input, at its offset.
            copy = name if name in self.written else f"k{name}"
            moved = f"{copy} = aligned({name}); {place} = {copy}.data_ptr()"
            self.w.line(f"if {place} & 15: {moved}")


def _written(step: Kernel | LibraryCall) -> set[str]:
    return set(step.mutates) if isinstance(step, LibraryCall) else set(step.stored)


# Calls that synchronize with the GPU, or whose work depends on data there.
_WAITING = (
    "nonzero", "_local_scalar_dense", "item", "masked_select", "unique", "repeat_interleave",
    "bincount", "histc", "equal", "is_nonzero", "_assert_async", "linalg_", "multinomial",
)  # fmt: skip


def _reason_unfit(plan: Plan) -> str:
    """Why a program cannot be recorded and replayed, in a word; empty if it can."""
    program = plan.program
    outputs: list[Any] = list(program.outputs)
    windows = [o.buffer for o in outputs if isinstance(o, View)]
    passed = [isinstance(o, Opaque) and o.name in program.inputs for o in outputs]
    if any(passed) or any(program.buffers[n].kind == BufferKind.INPUT for n in windows):
        return "result_is_an_input"
    if storage_inputs(plan):
        return "call_looks_at_storage"
    for step in plan.steps:
        if not isinstance(step, LibraryCall):
            continue
        name = step.op.split(".")[1] if "." in step.op else step.op
        if step.op.startswith("py:") or name.startswith(_WAITING):
            return f"call_of_{name.removeprefix('py:')}"
        if step.new_sizes:
            return "size_depends_on_data"
        if _moves_to_host(step):
            return "copy_between_devices"
    return ""


def _moves_to_host(step: LibraryCall) -> bool:
    devices = [v for k, v in step.kwargs if k == "device" and isinstance(v, torch.device)]
    is_copy = step.op.startswith("aten._to_copy")
    return any(is_copy or device.type == "cpu" for device in devices)
