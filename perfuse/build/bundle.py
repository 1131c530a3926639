"""`Bundle`: everything needed to launch a GPU program's kernels, as files of plain data.

bundle.json     which GPU it is for, and of each kernel what a launch must know
code0.bin ...   machine code, as the driver loads it
module.py       the kernels' text, only where it is interpreted instead
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perfuse.codegen.triton.sources import TritonKernel
from perfuse.errors import MALFORMED, CacheDamaged
from perfuse.gpu import Platform

BUNDLE, MODULE = "bundle.json", "module.py"


@dataclass(frozen=True, slots=True)
class CodeObject:
    """One compiled kernel."""

    name: str
    symbol: str  # the function's name in the machine code
    num_threads: int
    shared_bytes: int
    scratch_bytes: int  # global memory for each block, which the launch has to provide
    num_registers: int  # of a thread
    stack_bytes: int  # of a thread: what did not fit into registers
    code: bytes


@dataclass(frozen=True, slots=True)
class Bundle:
    """Compiled kernels; or, to be interpreted, their text and signatures."""

    kind: Platform
    arch: str
    objects: tuple[CodeObject, ...] = ()
    text: str = ""
    kernels: tuple[TritonKernel, ...] = ()


def bundle_files(bundle: Bundle) -> dict[str, bytes]:
    """The files that hold a bundle."""
    rows = []
    files: dict[str, bytes] = {}
    for number, made in enumerate(bundle.objects):
        rows.append({**facts_of(made), "file": f"code{number}.bin"})
        files[f"code{number}.bin"] = made.code
    kernels = [{**dataclasses.asdict(k), "divisible": sorted(k.divisible)} for k in bundle.kernels]
    document = {"kind": bundle.kind, "arch": bundle.arch, "objects": rows, "kernels": kernels}
    files[BUNDLE] = json.dumps(document).encode()
    files[MODULE] = bundle.text.encode()
    return files


def facts_of(made: CodeObject) -> dict[str, Any]:
    """All but the code."""
    return {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if f.name != "code"}


def read_bundle(read: Callable[[str], bytes]) -> Bundle:
    """The bundle that files hold; `read` gives the contents of one by its name."""
    try:
        document = json.loads(read(BUNDLE))
        objects = [CodeObject(code=read(row.pop("file")), **row) for row in document["objects"]]
        kernels = tuple(_kernel_of(row) for row in document["kernels"])
        text = read(MODULE).decode()
        return Bundle(Platform(document["kind"]), document["arch"], tuple(objects), text, kernels)
    except MALFORMED as error:
        raise CacheDamaged(f"not a bundle: {type(error).__name__}: {error}") from error


def _kernel_of(row: dict[str, Any]) -> TritonKernel:
    pairs = {what: tuple((a, b) for a, b in row[what]) for what in ("signature", "constants")}
    return TritonKernel(**{**row, **pairs, "divisible": frozenset(row["divisible"])})
