"""Whole Perfuse programs on the interpreter: a backend for gfx942 whose kernels run here.

`interpreted_gfx942` is a block in which `torch.compile(..., backend="perfuse")` of CPU tensors
generates the host program and the Triton kernels for gfx942, has Triton compile them to code
objects, and runs these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perfuse import config
from perfuse.backends import BACKENDS, GPU_BACKEND, Backend
from perfuse.build.bundle import CodeObject, read_bundle
from perfuse.build.triton import assembly_of
from perfuse.cache.manifest import Entry
from perfuse.codegen.host.source import HostSource
from perfuse.codegen.host.tables import LaunchRow
from perfuse.codegen.triton.sources import TritonKernel, TritonSources
from perfuse.context import Context
from perfuse.ir import index as ix
from perfuse.ir.atoms import Symbol
from perfuse.ir.index import Dim
from perfuse.runtime.bind_gpu import bind_gpu
from perfuse.runtime.frame import GpuFrame
from perfuse.runtime.host_names import Call
from perfuse.runtime.records import kind_of
from perfuse.schedule.plan import Plan
from perfuse.testing import fresh_cache
from tests.gfx9.assembly import parse_assembly
from tests.gfx9.code_object import Descriptor, descriptor_of
from tests.gfx9.machine import Kernel
from tests.gfx9.memory import Memory

ARCH = "gfx942"
Run = partial[None]


@dataclass(frozen=True)
class Program:
    """Facts about a program that its launches need, besides the host program."""

    plan: Plan
    kernels: dict[str, TritonKernel]
    assembly: dict[str, str]
    extents: dict[int, tuple[Dim, int]]  # place of a pointer -> elements, and bytes of each


def _extents(plan: Plan, sources: TritonSources, host: HostSource) -> dict[int, tuple[Dim, int]]:
    """The memory that each pointer of the host program points to."""
    assert host.gpu is not None
    rows = [row for row in host.gpu.records if isinstance(row, LaunchRow)]
    found: dict[int, tuple[Dim, int]] = {}
    for launch, row in zip(sources.all_launches, rows, strict=True):
        scratch = {s.name: s for s in launch.scratch}
        for name, place in zip(launch.buffers, row.pointers, strict=True):
            if name in scratch:
                found[place] = scratch[name].size, scratch[name].dtype.num_bytes
            elif name in plan.program.buffers:
                buffer = plan.program.buffers[name]
                found[place] = buffer.num_elements, buffer.dtype.num_bytes
    return found


def _kernel(text: str, made: CodeObject) -> Kernel:
    """A kernel by its assembly, which has to be that of the code object."""
    assembly = parse_assembly(text)
    settings = assembly.settings
    told = Descriptor(
        settings["group_segment_fixed_size"],
        settings["private_segment_fixed_size"],
        settings["kernarg_size"],
    )
    assert descriptor_of(made.code, made.symbol) == told, f"{made.name}: another code object"
    return Kernel(assembly, made.num_threads, made.shared_bytes)


class Launcher:
    """Runs the launches of one program."""

    keeps_memory = False

    def __init__(self, program: Program, objects: Sequence[CodeObject]) -> None:
        self.program = program
        self.kernels = {made.name: _kernel(program.assembly[made.name], made) for made in objects}
        self.inputs: list[tuple[int, int]] = []  # the storages of the call's arguments
        self.sizes: dict[ix.Atom, Dim] = {}  # size symbols of the call

    def take(self, args: Sequence[Any]) -> None:
        """Note the memory and the sizes that a call brings."""
        tensors = [value for value in args if isinstance(value, Tensor)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        self.inputs = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
        buffers = self.program.plan.program.buffers
        known: list[tuple[Dim, int]] = []
        for name, value in zip(self.program.plan.program.inputs, args, strict=True):
            if isinstance(value, int):
                known.append((ix.symbol(name), value))
            elif name in buffers:
                known += zip(buffers[name].shape, value.shape, strict=True)
                known += zip(buffers[name].strides, value.stride(), strict=True)
        self.sizes = {}
        for _ in known:  # what one size says may be needed to read another
            for dim, size in known:
                self._learn(ix.substitute(dim, self.sizes, lambda value: value), size)

    def _learn(self, dim: Dim, value: int) -> None:
        """Find a symbol from a size that is linear in it and has no other."""
        atoms = ix.atoms_of(dim)
        atom = next(iter(atoms), None)
        if len(atoms) == 1 and isinstance(atom, Symbol):
            factor = ix.coefficient_of(dim, atom)
            rest = ix.substitute(dim, {atom: 0}, lambda value: value)
            if isinstance(factor, int) and factor and isinstance(rest, int):
                self.sizes[atom] = (value - rest) // factor

    def prepare(self, frame: GpuFrame) -> None:
        """Give the frame what `launch` runs."""
        rows = enumerate(frame.tables.records)
        records = [partial(kind_of(row).run, self, frame, k, row) for k, row in rows]  # type: ignore[arg-type]
        segments = frame.tables.segments
        frame.segments = [records[first : first + count] for first, count in segments]

    def launch(self, segment: list[Run], stream: int) -> int:
        """Run the records of a segment in order."""
        for run in segment:
            run()
        return 0

    def failed(self, code: int) -> None:
        raise AssertionError("an interpreted launch fails by raising")

    def interpret(self, frame: GpuFrame, number: int, row: LaunchRow) -> None:
        """Run one launch."""
        kernel = self.program.kernels[row.kernel]
        values = [frame.pointers[place] for place in row.pointers]
        values += [frame.sizes[place] for place in row.sizes]
        passed = [name for name, kind in kernel.signature if kind != "constexpr"]
        for name, value in zip(passed, values, strict=True):
            assert name not in kernel.divisible or value % 16 == 0, f"{kernel.name}: {name}"
        grid = frame.grid(number)
        if min(grid) > 0:
            self.kernels[row.kernel].launch(grid, values, self._memory(frame))

    def _memory(self, frame: GpuFrame) -> Memory:
        regions = [*self.inputs, (frame.arena.data_ptr(), frame.arena.nbytes)]
        regions += [(kept.data_ptr(), kept.nbytes) for kept in frame.kept]
        for place, (count, size) in self.program.extents.items():
            regions.append((frame.pointers[place], self._value(count) * size))
        return Memory([region for region in regions if region[0]])

    def _value(self, dim: Dim) -> int:
        found = ix.substitute(dim, self.sizes, lambda value: value)
        assert isinstance(found, int), f"a size that is not known: {found}"
        return found


class InterpretedBackend:
    """The GPU's backend, with the interpreter in place of a driver.

    `alter` maps the Triton module, and then each kernel's assembly, to what is run in its place.
    """

    def __init__(self, alter: Callable[[str], str]) -> None:
        self.alter = alter
        self.programs: dict[str, Program] = {}  # by the text of the host program
        self.launchers: list[Launcher] = []

    def executed(self) -> set[str]:
        """The mnemonics that all kernels together have run."""
        return {name for kernel in self.kernels() for name in kernel.executed}

    def kernels(self) -> list[Kernel]:
        """The kernels of all programs that were loaded."""
        return [kernel for made in self.launchers for kernel in made.kernels.values()]

    def row(self) -> Backend:
        own = (self.generate, self.build, self.host, self.load)
        return Backend("gfx9", _serves, *own, retile=GPU_BACKEND.retile)

    def generate(self, plan: Plan, context: Context) -> TritonSources:
        made: TritonSources = GPU_BACKEND.generate(plan, _compiled(context))
        return dataclasses.replace(made, text=self.alter(made.text))

    def build(self, sources: TritonSources, context: Context) -> tuple[Entry, ...]:
        return GPU_BACKEND.build(sources, _compiled(context))

    def host(self, plan: Plan, sources: TritonSources, context: Context) -> HostSource:
        host = GPU_BACKEND.host(plan, sources, context)
        assert context.target.gpu is not None
        texts = map(self.alter, assembly_of(sources, context.target.gpu, context))
        names = [kernel.name for kernel in sources.kernels]
        self.programs[host.text] = Program(
            plan,
            dict(zip(names, sources.kernels, strict=True)),
            dict(zip(names, texts, strict=True)),
            _extents(plan, sources, host),
        )
        return host

    def load(
        self, host: HostSource, built: Sequence[Entry], constants: Mapping[str, Any], context: Any
    ) -> Call:
        bundle = read_bundle(built[0].read_bytes)
        launcher = Launcher(self.programs[host.text], bundle.objects)
        self.launchers.append(launcher)
        call = bind_gpu(host, launcher, constants)

        def run(args: list[Any]) -> tuple[Any, ...]:
            launcher.take(args)
            return call(args)

        return run


def _serves(target: Any) -> bool:
    return target.gpu is not None and target.gpu.arch == ARCH


def _compiled(context: Context) -> Context:
    """The context without Triton's interpreter: what is generated is what the GPU gets."""
    gpu = dataclasses.replace(context.settings.gpu, interpret=False)
    return dataclasses.replace(context, settings=dataclasses.replace(context.settings, gpu=gpu))


@contextmanager
def interpreted_gfx942(alter: Callable[[str], str] = str) -> Iterator[InterpretedBackend]:
    """A block in which CPU tensors are compiled for gfx942 and run by the interpreter."""
    backend = InterpretedBackend(alter)
    row = backend.row()
    BACKENDS.insert(0, row)
    torch._dynamo.reset()
    settings = {"gpu.interpret": True, "triton.arch": ARCH, "verify": True}
    try:
        with fresh_cache(), config.patch(settings):
            yield backend
    finally:
        BACKENDS.remove(row)
        torch._dynamo.reset()
