"""`aot_compile`: a function with its parameters, compiled to an artefact on disk."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfuse.build import LIBRARY as BUILT
from perfuse.build import UNIT_LIBRARY
from perfuse.build.triton import build_launcher
from perfuse.cache.access import open_store
from perfuse.capture.aot_capture import CapturedCall, capture_call, own_tensors
from perfuse.capture.aot_document import Held, document_of
from perfuse.capture.native import NATIVE, native_table
from perfuse.capture.request import Request
from perfuse.codegen.triton.sources import unit_name
from perfuse.context import Context
from perfuse.errors import ArtefactError
from perfuse.graph.canonical import is_storable
from perfuse.pipeline import Compiled
from perfuse.runtime.artefact import ARTEFACT, LAUNCHER, LIBRARY, PARAMETERS, about_here
from perfuse.runtime.package import check_replaceable, write_package
from perfuse.runtime.saved import SavedProgram, files_of, number_functions
from perfuse.runtime.signing import Key, check_private_key

TRY_AGAIN = "try again; `perfuse doctor` checks whether the cache is usable."
KERNELS = {BUILT: LIBRARY}
NATIVE_SETTINGS = {"cpu.tune_matmuls": False}  # the native host has no other libraries


def aot_compile(
    fn: Callable[..., Any],
    args: Sequence[Any],
    path: str | Path | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    *,
    variants: Sequence[Sequence[Any]] = (),
    training: bool = False,
    native: bool = False,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    sign_with: Key | None = None,
) -> Path:
    """Compile `fn(*args, **kwargs)` into the folder `path`, and return its path.

    The parameters, buffers and tensors that `fn` closes over are saved in the artefact as they are
    now; `perfuse.load(path)` runs it in a new process without tracing. Sizes are those of `args`.
    With `dynamic=True` every dimension that `fn` itself does not fix may have any other size, from
    2 up. `variants` are further arguments to compile for; a call uses the first that match. With
    `training`, at fixed sizes or any, the results have gradients, which reach the arguments and the
    parameters of the loaded artefact; without, arguments that require gradients are refused unless
    gradients are off. `native` requires that a C++ program can run it without PyTorch
    (perfuse/native/perfuse.h). `mode` and `options` are those of `perfuse.compile`, by default
    those that `fn` was compiled with; `sign_with` is an Ed25519 private key.
    """
    calls = [_checked_args(given, bool(dynamic)) for given in (args, *variants)]
    request = _request(fn, mode, options, bool(dynamic), native)
    name = getattr(request.function, "__name__", type(request.function).__name__)
    made = Path(path) if path is not None else Path(f"{name}.perfuse")
    check_replaceable(made)  # before minutes of compiling, not after
    if sign_with is not None:
        check_private_key(sign_with)
    named = own_tensors(dict(kwargs or {}), bool(dynamic))
    captures = [(given, capture_call(request, given, named, training)) for given in calls]
    files = _files(captures, named, request.function, name)
    about = _add_runners(files, captures[0][1], native)
    write_package(made, files, about, sign_with)
    return made


def _files(
    captures: Sequence[tuple[tuple[Any, ...], CapturedCall]],
    kwargs: dict[str, Any],
    function: Callable[..., Any],
    name: str,
) -> dict[str, bytes]:
    """The programs of all variants, the tensors that they share, and how each is called."""
    held, files = Held(function), dict[str, bytes]()
    documents = []
    for given, capture in captures:
        document = document_of(capture, given, kwargs, held)
        document["graphs"] = [_add_program(files, capture, one) for one in capture.graphs]
        documents.append(document)
    rows, parameters = held.packed()
    files[ARTEFACT] = json.dumps({"name": name, "held": rows, "variants": documents}).encode()
    files[PARAMETERS] = parameters
    return files


def _add_runners(files: dict[str, bytes], first: CapturedCall, native: bool) -> dict[str, Any]:
    """Add the table for C++ programs and the launcher, where needed; what the package is for."""
    context = first.context
    assert context is not None
    arch, isa = _gpu_arch(context), context.target.isa
    if native:
        document = json.loads(files[ARTEFACT])["variants"][0]
        files[NATIVE] = native_table(first.graphs[0], document, files, isa)
    launcher = build_launcher(context) if arch else None
    files |= {} if launcher is None else {LAUNCHER: launcher.read_bytes(BUILT)}
    return about_here(isa, arch)


def _request(
    fn: Callable[..., Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
    is_dynamic: bool,
    is_native: bool,
) -> Request:
    asked = Request.of(fn, mode, options)
    extra = {"on_error": "raise", **(NATIVE_SETTINGS if is_native else {})}
    return dataclasses.replace(
        asked, overrides={**asked.overrides, **extra}, is_dynamic=is_dynamic, is_fullgraph=True
    )


def _checked_args(args: Any, is_dynamic: bool) -> tuple[Any, ...]:
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise ArtefactError(
            f"arguments must be a tuple, got a {type(args).__name__}",
            hint="aot_compile(fn, (x,)) compiles fn(x).",
        )
    return tuple(own_tensors(list(args), is_dynamic))


def _gpu_arch(context: Context) -> str:
    """The GPU that an artefact is for; None if its kernels run in the interpreter."""
    gpu = context.target.gpu
    return "" if gpu is None or context.device.type == "cpu" else gpu.arch


def _add_program(files: dict[str, bytes], capture: CapturedCall, compiled: Compiled) -> int:
    """Add the files of one graph, and return its number."""
    known = number_functions(compiled.host.ops)
    held = compiled.program.constants
    constants = {name: value for name, value in held.items() if known.get(name) is not value}
    unfit = [name for name, value in constants.items() if not is_storable(value)]
    if unfit:
        raise ArtefactError(
            f"the graph contains values that cannot be saved as data: {', '.join(unfit)}",
            hint="use torch.compile(fn, backend='perfuse') instead.",
        )
    saved = SavedProgram(compiled.host, (), constants, compiled.counts, str(compiled.plan))
    found = files_of(saved)
    if compiled.library is not None:
        assert capture.context is not None
        entry = open_store(capture.context).get(compiled.library)
        if entry is None:
            raise ArtefactError("the code that was just built cannot be read back", hint=TRY_AGAIN)
        names = KERNELS if compiled.host.gpu is None else {name: name for name in entry.files}
        found |= {name: entry.read_bytes(kept) for kept, name in names.items()}
        units = [entry for entry in compiled.built if UNIT_LIBRARY in entry.contents]
        for place, unit in enumerate(units):
            found[f"{unit_name(place)}.so"] = unit.read_bytes(UNIT_LIBRARY)
    number = sum(name.endswith("-program.json") for name in files)
    files |= {f"{number}-{name}": data for name, data in found.items()}
    return number
