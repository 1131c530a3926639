"""`SavedProgram`: a compiled program as plain data, and the files that hold it.

The host program is stored as Python text, which is run. That needs no additional trust: it is
stored with the native library it launches, in a store that is only used while no other user can
write to it (cache/folders.py), and its checksum is verified before it is read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from perfuse.cache.manifest import is_key
from perfuse.codegen.host.source import ArenaWindow, GuardRow, HostSource
from perfuse.decision import Decision
from perfuse.errors import MALFORMED, CacheDamaged
from perfuse.graph.facts import PURE_PYTHON
from perfuse.runtime.records import document_of, tables_of
from perfuse.torch_compat.ops import op_name
from perfuse.torch_compat.tensors import raw_bytes, tensor_of_bytes

PROGRAM = "program.json"
CONSTANTS = "constants.bin"
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class SavedProgram:
    """Everything needed to run a program again: no graph, no plan, no trace."""

    host: HostSource
    built: tuple[str, ...]  # keys of its libraries and bundles in the store
    constants: Mapping[str, torch.Tensor]
    counts: Mapping[str, int]  # the counts of its compile, reported again when it is loaded
    plan: str = ""  # the printed plan, for reports
    decisions: tuple[Decision, ...] = ()  # what was measured to choose among implementations


def files_of(saved: SavedProgram) -> dict[str, bytes]:
    """The files that hold a program."""
    rows, data = pack_tensors(saved.constants)
    document = {
        "host": _host_document(saved.host),
        "built": list(saved.built),
        "constants": rows,
        "counts": dict(saved.counts),
        "plan": saved.plan,
        "decisions": [decision.to_json() for decision in saved.decisions],
    }
    return {PROGRAM: json.dumps(document).encode(), CONSTANTS: data}


def read_program(read: Callable[[str], bytes]) -> SavedProgram:
    """The program that files hold; `read` gives the contents of one by its name."""
    try:
        document = json.loads(read(PROGRAM))
        built = tuple(document["built"])
        if not all(map(is_key, built)):
            raise ValueError(f"{built!r} are not keys")
        return SavedProgram(
            _host_of(document["host"]),
            built,
            unpack_tensors(document["constants"], read(CONSTANTS)),
            {str(name): int(n) for name, n in document["counts"].items()},
            str(document["plan"]),
            tuple(map(Decision.from_json, document["decisions"])),
        )
    except MALFORMED as error:
        raise CacheDamaged(f"not a saved program: {type(error).__name__}: {error}") from error


def number_functions(ops: Iterable[str]) -> dict[str, Any]:
    """The functions of Python numbers among the ops of a program: known by name, not kept."""
    known = {op_name(function): function for function in PURE_PYTHON}
    return {op: known[op] for op in ops if op in known}


def _host_document(host: HostSource) -> dict[str, Any]:
    gpu = None if host.gpu is None else document_of(host.gpu)
    return {**dataclasses.asdict(dataclasses.replace(host, gpu=None)), "gpu": gpu}


def _host_of(document: dict[str, Any]) -> HostSource:
    windows = tuple(
        ArenaWindow(w["offset"], w["dtype"], tuple(w["shape"]), tuple(w["strides"]))
        for w in document["windows"]
    )
    lists = {name: tuple(document[name]) for name in ("constants", "segments", "ops")}
    fixed = tuple((place, offset) for place, offset in document["fixed_pointers"])
    gpu = None if document["gpu"] is None else tables_of(document["gpu"])
    guards = tuple(GuardRow(**row) for row in document["guards"])
    changed = {"windows": windows, "fixed_pointers": fixed, "gpu": gpu, "guards": guards}
    return HostSource(**{**document, **lists, **changed})


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[list[dict[str, Any]], bytes]:
    """Tensors as rows of names and layouts, and one block of raw bytes."""
    rows: list[dict[str, Any]] = []
    data = bytearray()
    for name, tensor in tensors.items():
        data += bytes(-len(data) % ALIGNMENT)
        rows.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "strides": list(tensor.stride()),
                "device": str(tensor.device),
                "offset": len(data),
            }
        )
        data += raw_bytes(tensor)
    return rows, bytes(data)


def unpack_tensors(rows: list[dict[str, Any]], data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of `pack_tensors`, each with the strides it had."""
    memory = bytearray(data)  # one writable copy, shared by all of them
    return {row["name"]: _unpacked(row, memory) for row in rows}


def _unpacked(row: dict[str, Any], memory: bytearray) -> torch.Tensor:
    dtype = getattr(torch, row["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{row['dtype']} is not a dtype")
    layout = (row["shape"], row["strides"])
    return tensor_of_bytes(memory, dtype, layout, row["offset"], row["device"])
