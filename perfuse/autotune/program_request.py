"""`ProgramRequest`: a compiled program that a worker loads and measures.

It holds the host program as the cache stores it and the keys of its libraries; the worker finds
those in the store, so nothing is compiled twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from perfuse.autotune.request import BenchmarkRequest, Operand, Run
from perfuse.backends import backend_of
from perfuse.cache.access import cache_folder, open_store
from perfuse.config import Settings, describe
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.errors import CacheDamaged
from perfuse.runtime.saved import PROGRAM, SavedProgram, files_of, read_program
from perfuse.schedule.plan import Plan


class ProgramRequest(BenchmarkRequest):
    """Runs a program that was built before; its first result counts."""

    def __init__(
        self, program: str, operands: Sequence[Operand], device: str, settings: dict[str, Any]
    ) -> None:
        self.program = program  # a document of runtime/saved.py
        self.operands = tuple(operands)
        self.device = device
        self.settings = settings  # those that are not the default

    @staticmethod
    def of(plan: Plan, operands: Sequence[Operand], context: Context) -> ProgramRequest:
        """Compile a placed plan without constants, into the store."""
        assert not plan.program.constants, "constants do not travel"
        context = _seen_by_worker(context)
        backend = backend_of(context.target)
        sources = backend.generate(plan, context)
        built = backend.build(sources, context)
        host = backend.host(plan, sources, context)
        saved = SavedProgram(host, tuple(entry.key for entry in built), {}, {})
        document = files_of(saved)[PROGRAM].decode()
        device = str(context.device)
        moved = [replace(operand, device=device) for operand in operands]
        return ProgramRequest(document, moved, device, changed_settings(context.settings))

    def loaded(self, inputs: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> Run:
        settings = Settings().with_overrides(self.settings)
        context = replace(Context.on(torch.device(self.device), settings), counters=Counters())
        files = {PROGRAM: self.program.encode()}
        saved = read_program(lambda name: files.get(name, b""))
        store = open_store(context)
        built = [store.get(key) for key in saved.built]
        entries = [entry for entry in built if entry is not None]
        if len(entries) < len(built):
            raise CacheDamaged("a library of the program is not in the store")
        call = backend_of(context.target).load(saved.host, entries, {}, context)
        return lambda: call(list(inputs))[0]


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
