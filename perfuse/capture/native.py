"""The table from which a C++ program runs an artefact: see `perfuse/native/perfuse.h`."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from perfuse.codegen.cpp.unit import CppSources
from perfuse.codegen.host.native import cannot, generate_native, layout
from perfuse.pipeline import Compiled
from perfuse.runtime.artefact import ARTEFACT, LIBRARY, PARAMETERS
from perfuse.runtime.saved import CONSTANTS, PROGRAM
from perfuse.runtime.variant import InputKind

NATIVE = "native.txt"


def native_table(
    compiled: Compiled, document: Mapping[str, Any], files: Mapping[str, bytes], isa: str
) -> bytes:
    """The table of the first variant; ArtefactError, with the reason, where it cannot have one."""
    if document["is_training"] or not isinstance(compiled.sources, CppSources):
        raise cannot("it is a training step or compiled for a GPU")
    steps = generate_native(compiled.plan, compiled.sources)
    kernels = f"0-{LIBRARY}"
    used = [name for name in (kernels, f"0-{CONSTANTS}", PARAMETERS) if name in files]
    lines = ["perfuse-native 2", f"isa {isa}"]
    lines += [f"file {name} {hashlib.sha256(files[name]).hexdigest()}" for name in used]
    lines += [f"library {kernels}"] if kernels in files else []
    lines += [*_arguments(compiled, document), *_held(compiled, document, files), *steps]
    table = ("\n".join(lines) + "\n").encode()
    return table + f"end {hashlib.sha256(table).hexdigest()}\n".encode()


def _arguments(compiled: Compiled, document: Mapping[str, Any]) -> Iterator[str]:
    """Each tensor argument, and which input of the graph it is."""
    inputs = dict(zip(compiled.program.inputs, document["inputs"], strict=True))
    names = {where: name for name, (kind, where) in inputs.items() if kind == InputKind.ARGUMENT}
    for number, row in enumerate(document["tensors"]):
        name = names.get(number, "-")
        buffer = compiled.program.buffers.get(name)
        if buffer is not None:
            yield f"argument {layout(name, 0, buffer, buffer)}"
            continue
        dims = " ".join(map(str, [*row["shape"], *row["strides"]]))
        yield f"argument - 0 {row['dtype']} {len(row['shape'])} {dims}".rstrip()


def _held(
    compiled: Compiled, document: Mapping[str, Any], files: Mapping[str, bytes]
) -> Iterator[str]:
    """The file and offset of each tensor that the function, or its graph, holds."""
    held = {row["name"]: row["offset"] for row in json.loads(files[ARTEFACT])["held"]}
    for name, (kind, where) in zip(compiled.program.inputs, document["inputs"], strict=True):
        if kind == InputKind.HELD:
            yield f"held {name} {PARAMETERS} {held[where]}"
        elif kind != InputKind.ARGUMENT:
            raise cannot("sizes are not fixed")
    for row in json.loads(files[f"0-{PROGRAM}"])["constants"]:
        yield f"held {row['name']} 0-{CONSTANTS} {row['offset']}"
