"""`ProgramRequest`: a compiled program that a worker loads and measures.

It holds the host program as the cache stores it and the keys of its libraries; the worker finds
those in the store, so nothing is compiled twice. Libraries that no disk keeps travel with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from perfuse.backends import backend_of
from perfuse.cache.access import cache_folder, open_store
from perfuse.cache.manifest import Entry
from perfuse.candidates.request import BenchmarkRequest, RandomTensor, Run
from perfuse.config import Settings, describe
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.errors import CacheDamaged
from perfuse.ir.dtype import to_torch
from perfuse.ir.index import Dim
from perfuse.ir.program import Program
from perfuse.runtime.host_names import Call
from perfuse.runtime.saved import PROGRAM, SavedProgram, files_of, read_program
from perfuse.schedule.plan import Plan
from perfuse.schedule.size_hints import value_of


class ProgramRequest(BenchmarkRequest):
    """Runs a program that was built before; its first result counts, or else its first input.

    If there is a guarded program, which checks its memory, it has to run without error first.
    """

    def __init__(
        self,
        program: str,
        operands: Sequence[RandomTensor],
        device: str,
        settings: dict[str, Any],
        guarded: str = "",
        libraries: Mapping[str, Mapping[str, bytes]] | None = None,
    ) -> None:
        self.program, self.guarded = program, guarded  # documents of runtime/saved.py
        self.libraries = dict(libraries or {})  # the files of those that are not on the disk
        self.operands = tuple(operands)
        self.device = device
        self.settings = settings  # those that are not the default

    @staticmethod
    def of(plan: Plan, guarded: Plan | None = None, *, context: Context) -> ProgramRequest:
        """Compile placed plans without constants, into the store."""
        assert not plan.program.constants, "constants do not travel"
        context = _seen_by_worker(context)
        document, entries = _document(plan, context)
        watched, more = ("", ()) if guarded is None else _document(guarded, context)
        operands, changed = (
            operands_of(plan.program, context.device),
            changed_settings(context.settings),
        )
        store = open_store(context)
        carried = {e.key: e.contents for e in (*entries, *more) if not store.is_on_disk(e.key)}
        return ProgramRequest(document, operands, str(context.device), changed, watched, carried)

    def benchmark(
        self, *input_tensors: torch.Tensor, output_tensor: torch.Tensor | None = None
    ) -> float:
        inputs = input_tensors or tuple(operand.tensor() for operand in self.operands)
        if self.guarded:
            self._call(self.guarded)(list(inputs))
        return super().benchmark(*inputs, output_tensor=output_tensor)

    def loaded(self, inputs: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> Run:
        call = self._call(self.program)
        # A program that only writes to its inputs has no results.
        return lambda: (call(list(inputs)) or inputs)[0]

    def _call(self, document: str) -> Call:
        settings = Settings().with_overrides(self.settings)
        context = replace(Context.on(torch.device(self.device), settings), counters=Counters())
        files = {PROGRAM: document.encode()}
        saved = read_program(lambda name: files.get(name, b""))
        store = open_store(context)
        built = [self._carried(key) or store.get(key) for key in saved.built]
        entries = [entry for entry in built if entry is not None]
        if len(entries) < len(built):
            raise CacheDamaged("a library of the program is not in the store")
        return backend_of(context.target).load(saved.host, entries, {}, context)

    def _carried(self, key: str) -> Entry | None:
        return Entry(key, self.libraries[key]) if key in self.libraries else None


def _document(plan: Plan, context: Context) -> tuple[str, Sequence[Entry]]:
    """A program as the cache stores it, and what was built for it."""
    backend = backend_of(context.target)
    sources = backend.generate(plan, context)
    built = backend.build(sources, context)
    host = backend.host(plan, sources, context)
    saved = SavedProgram(host, tuple(entry.key for entry in built), {}, {})
    return files_of(saved)[PROGRAM].decode(), tuple(built)


def operands_of(program: Program, device: torch.device) -> list[RandomTensor]:
    """Random inputs of a program by description; dynamic sizes are likely ones."""
    made = []
    for number, name in enumerate(program.inputs):
        buffer = program.buffers[name]
        shape, strides = (known_sizes(dims, program) for dims in (buffer.shape, buffer.strides))
        made.append(RandomTensor(shape, strides, to_torch(buffer.dtype), str(device), seed=number))
    return made


def random_inputs(program: Program, device: torch.device) -> dict[str, torch.Tensor]:
    """Random inputs of a program by name, the same numbers each time."""
    made = (operand.tensor() for operand in operands_of(program, device))
    return dict(zip(program.inputs, made, strict=True))


def known_sizes(dims: Sequence[Dim], program: Program) -> tuple[int, ...]:
    """Sizes or strides as numbers: dynamic ones by their likely values."""
    return tuple(value_of(dim, program.hints) for dim in dims)


def changed_settings(settings: Settings) -> dict[str, Any]:
    """The settings that are not the default, with the folder of the store spelled out."""
    changed = {
        row.name: value for row in describe() if (value := settings.get(row.name)) != row.default
    }
    folder = cache_folder(settings)
    return changed if folder is None else {**changed, "cache.dir": str(folder)}


def _seen_by_worker(context: Context) -> Context:
    """The device as a worker sees it: the only one, if each worker has its own."""
    is_own = context.settings.autotune_multi_device and context.device.type == "cuda"
    return replace(context, device=torch.device("cuda:0")) if is_own else context
