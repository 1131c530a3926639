"""`aot_compile`: a function with its parameters, compiled to an artefact on disk."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from perfuse.build.compiler import LIBRARY as BUILT
from perfuse.build.compiler import open_store
from perfuse.capture.backend import Halves
from perfuse.capture.device import device_of
from perfuse.capture.native import NATIVE, native_table
from perfuse.capture.request import Request
from perfuse.capture.simple import SYMBOLIC, facts_or_reason
from perfuse.capture.trace import trace
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.errors import ArtefactError, PerfuseError, UnsupportedOp
from perfuse.graph.canonical import is_storable
from perfuse.lower.symbols import host_formula
from perfuse.pipeline import Compiled
from perfuse.runtime.artefact import ARTEFACT, LAUNCHER, LIBRARY, PARAMETERS, about_here
from perfuse.runtime.launch import native_launcher
from perfuse.runtime.package import check_replaceable, write_package
from perfuse.runtime.saved import SavedProgram, files_of, pack_tensors
from perfuse.runtime.signing import Key
from perfuse.runtime.tree import describe
from perfuse.runtime.wrapper import Facts, wrap
from perfuse.torch_compat import sym_expression, tree_leaves
from perfuse.torch_guards import size_guards

ONE_GRAPH = "fullgraph: torch._dynamo.explain shows what breaks the graph."
TRY_AGAIN = "try again; perfuse doctor says whether the cache can be used."
NO_VIEWS = "return copies (.clone()), and tensors of known sizes."
KERNELS = {BUILT: LIBRARY}
NATIVE_SETTINGS = {"cpu.tune_products": False}  # products of the library's own are not there


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
    """Compile `fn(*args, **kwargs)` into the folder `path`, and say where it is.

    What `fn` holds (parameters, buffers, tensors it closes over) goes into the artefact as it is
    now; `perfuse.load(path)` runs it in a new process without tracing. Sizes are those of `args`;
    with `dynamic=True` they may be others, and `variants` are further arguments to compile for,
    of which a call takes the first that fit. With `training` the results have gradients, which
    reach the arguments and the parameters of the loaded artefact. `native` demands that a C++
    program can run it without PyTorch (perfuse/native/perfuse.h). `mode` and `options` are those
    of `perfuse.compile`, by default those that `fn` was compiled with; `sign_with` is an Ed25519
    private key.
    """
    calls = [_checked_args(given) for given in (args, *variants)]
    request = _request(fn, mode, options, bool(dynamic), native)
    name = getattr(request.function, "__name__", type(request.function).__name__)
    made = Path(path) if path is not None else Path(f"{name}.perfuse")
    check_replaceable(made)  # before minutes of compiling, not after
    captures = [(given, _capture(request, given, dict(kwargs or {}), training)) for given in calls]
    files = _files(captures, dict(kwargs or {}), request.function, name)
    first = captures[0][1]
    context = first.context
    assert context is not None
    if native:
        document = json.loads(files[ARTEFACT])["variants"][0]
        files[NATIVE] = native_table(first.graphs[0], document, files, context.target.isa)
    launcher = native_launcher(context) if _gpu_arch(context) else None
    files |= {} if launcher is None else {LAUNCHER: launcher}
    write_package(made, files, about_here(context.target.isa, _gpu_arch(context)), sign_with)
    return made


def _files(
    captures: Sequence[tuple[tuple[Any, ...], Capture]],
    kwargs: dict[str, Any],
    function: Callable[..., Any],
    name: str,
) -> dict[str, bytes]:
    """The programs of all variants, the tensors that they share, and how each is called."""
    held, files = _Held(function), dict[str, bytes]()
    documents = []
    for given, capture in captures:
        document = _document(capture, given, kwargs, held)
        document["graphs"] = [_add_program(files, capture, one) for one in capture.graphs]
        documents.append(document)
    rows, parameters = held.packed()
    files[ARTEFACT] = json.dumps({"name": name, "held": rows, "variants": documents}).encode()
    files[PARAMETERS] = parameters
    return files


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
        asked,
        overrides={**asked.overrides, **extra},
        is_dynamic=is_dynamic,
        is_fullgraph=True,
    )


def _checked_args(args: Any) -> tuple[Any, ...]:
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise ArtefactError(
            f"the arguments come in a tuple, not as a {type(args).__name__}",
            hint="aot_compile(fn, (x,)) compiles fn(x).",
        )
    return tuple(args)


@dataclass(slots=True)
class Capture:
    """The one graph of a call: what went in, what it compiled to, what came out."""

    settings: Settings
    context: Context | None = None  # known once the graph's device is
    graphs: list[Compiled] = field(default_factory=list)  # one, or forward and backward
    traced: list[Any] = field(default_factory=list)  # the inputs as traced: sizes may be symbols
    inputs: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    result: Any = None  # what the function returned, with these results in it
    facts: Facts | None = None

    def backend(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend: compiles as always, and keeps what passes by."""
        if self.graphs:
            raise ArtefactError("the function needs more than one graph", hint=ONE_GRAPH)
        context = self.context = Context.on(device_of(module, inputs), self.settings)
        halves = Halves(context, [self.graphs.append])
        trace(
            module,
            inputs,
            self.settings,
            compiler=halves.compile,
            partition=halves.partition,
        )
        found = facts_or_reason(halves.graphs, len(inputs), takes_any_size=True)
        if isinstance(found, str):
            raise _refused(found)
        self.facts = found
        self.traced = [
            node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")
        ]
        backward = None
        if self.facts.is_training:
            halves.compile("backward", halves.graphs["backward"])
            backward = partial(getattr, halves.executables["backward"], "call")
        run = wrap(halves.forward().call, backward, self.facts)
        written = self.facts.written

        def call(*args: Any) -> Any:
            with _left_as_they_were([args[i] for i in written]):
                self.inputs, self.results = list(args), list(run(*args))
            return self.results

        return call


def _refused(reason: str) -> ArtefactError:
    """The error for a graph that needs more of AOTAutograd than an artefact holds."""
    if reason in (SYMBOLIC, "sizes", "inputs"):
        return ArtefactError(
            "an artefact for training has fixed sizes",
            hint="leave out dynamic=True; variants=[...] compiles for several sizes.",
        )
    if reason in ("aliased_output", "intermediate_base", "alias_guards"):
        told = "the function returns views of its arguments, or several views of one result"
        return ArtefactError(told, hint="return copies (.clone()).")
    told = f"the function does what an artefact cannot: {reason.replace('_', ' ')}"
    return ArtefactError(told, hint="use torch.compile(fn, backend='perfuse') for it.")


@contextmanager
def _left_as_they_were(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Compiling runs the function once: what that writes, and the random numbers, are put back."""
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)


def _capture(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], is_training: bool
) -> Capture:
    capture = Capture(request.settings())
    with torch.set_grad_enabled(is_training):
        try:
            capture.result = request.call(args, kwargs, capture.backend)
        except Exception as error:
            own = getattr(error, "inner_exception", None)  # what Dynamo wraps
            if isinstance(own, PerfuseError):
                raise own from None
            raise
    if not capture.graphs or capture.facts is None:
        raise ArtefactError("the function computes nothing with tensors")
    if is_training and not capture.facts.is_training:
        raise ArtefactError(
            "nothing here can be trained: no result depends on a tensor that requires a gradient",
            hint="leave out training=True, or let arguments or parameters require gradients.",
        )
    return capture


class _Held:
    """The tensors that a function holds, by name, each once however many variants use it."""

    def __init__(self, fn: Any) -> None:
        self._names: dict[int, str] = {}  # by the id of the tensor
        self._tensors: dict[str, torch.Tensor] = {}
        if isinstance(fn, torch.nn.Module):
            named = (*fn.named_parameters(), *fn.named_buffers())
            self._names = {id(tensor): name for name, tensor in named}

    def name_of(self, tensor: torch.Tensor) -> str:
        if id(tensor) not in self._names:
            taken = set(self._names.values())  # a module's own parameter may be called p0
            free = (name for i in itertools.count() if (name := f"p{i}") not in taken)
            self._names[id(tensor)] = next(free)
        name = self._names[id(tensor)]
        self._tensors[name] = tensor  # kept, so that its id stays its own
        return name

    def packed(self) -> tuple[list[dict[str, Any]], bytes]:
        plain = {name: tensor.detach() for name, tensor in self._tensors.items()}
        rows, data = pack_tensors(plain)
        for row in rows:
            row["requires_grad"] = self._tensors[row["name"]].requires_grad
        return rows, data


def _document(
    capture: Capture, args: Sequence[Any], kwargs: dict[str, Any], held: _Held
) -> dict[str, Any]:
    """What a loaded artefact must know to call one variant."""
    facts = capture.facts
    assert facts is not None
    arguments = [list(args), kwargs]
    given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    numbers = {id(tensor): number for number, tensor in enumerate(given)}
    traced = {id(v): t for v, t in zip(capture.inputs, capture.traced, strict=True)}
    written = {id(capture.inputs[i]) for i in facts.written}
    rows = [_row(tensor, traced.get(id(tensor)), id(tensor) in written) for tensor in given]
    sizes = [size for row in rows for size in row["shape"] if isinstance(size, str)]
    symbols = {size for size in sizes if size.isidentifier()}
    pairs = zip(capture.inputs, capture.traced, strict=True)
    return {
        "arguments": describe(arguments, lambda tensor: numbers[id(tensor)]),
        "tensors": rows,
        "inputs": [_place(value, like, numbers, held, symbols) for value, like in pairs],
        "guards": [_formula(guard) for guard in size_guards(capture.traced, symbols)],
        "results": describe(capture.result, _Places([*capture.results, *given])),
        "facts": dataclasses.asdict(facts),
        "is_training": facts.is_training,
    }


def _place(
    value: Any, traced: Any, numbers: dict[int, int], held: _Held, symbols: set[str]
) -> list[Any]:
    """Where an input of the graph comes from: an argument, a size of one, or the function."""
    if isinstance(value, torch.Tensor):
        known = numbers.get(id(value))
        return ["held", held.name_of(value)] if known is None else ["argument", known]
    if isinstance(value, bool | int | float):
        size = _size(traced) if isinstance(traced, torch.SymInt) else value
        return ["size", size] if size in symbols else ["number", value]
    raise ArtefactError(f"the graph depends on a {type(value).__name__}", hint=NO_VIEWS)


def _row(tensor: torch.Tensor, traced: Any, is_written: bool) -> dict[str, Any]:
    like = traced if isinstance(traced, torch.Tensor) else tensor
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": [_size(size) for size in like.shape],
        "strides": [_size(stride) for stride in like.stride()],
        "device": str(tensor.device),
        "is_written": is_written,
        "has_gradient": tensor.requires_grad,
    }


def _size(size: int | torch.SymInt) -> int | str:
    """A number, or the formula of a size that calls may choose."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = sym_expression(size)
    return int(expression) if expression.is_Integer else _formula(expression)


def _formula(expression: sympy.Basic) -> str:
    try:
        return host_formula(expression)
    except UnsupportedOp as error:
        raise ArtefactError(
            f"an artefact cannot hold what the function assumes of sizes: {error.message}",
            hint="compile it for fixed sizes.",
        ) from error


class _Places:
    """The number of a result: of those the graph gave, and after these the arguments."""

    def __init__(self, known: list[Any]) -> None:
        self.known = known

    def __call__(self, tensor: torch.Tensor) -> int:
        for number, value in enumerate(self.known):
            if value is tensor:
                return number
        raise ArtefactError("a result does not come out of the graph", hint=NO_VIEWS)


def _gpu_arch(context: Context) -> str:
    """The GPU that an artefact is for; none where the code can be interpreted."""
    gpu = context.target.gpu
    return "" if gpu is None or context.device.type == "cpu" else gpu.arch


def _add_program(files: dict[str, bytes], capture: Capture, compiled: Compiled) -> int:
    """Add the files of one graph, and say under which number."""
    constants = compiled.program.constants
    if not all(is_storable(value) for value in constants.values()):
        raise ArtefactError("the graph holds something that cannot be kept as data")
    saved = SavedProgram(compiled.host, None, constants, compiled.counts, str(compiled.plan))
    found = files_of(saved)
    if compiled.library is not None:
        assert capture.context is not None
        entry = open_store(capture.context).get(compiled.library)
        if entry is None:
            raise ArtefactError("the code that was just built cannot be read back", hint=TRY_AGAIN)
        names = KERNELS if compiled.host.gpu is None else {name: name for name in entry.files}
        found |= {name: entry.read_bytes(kept) for kept, name in names.items()}
    number = sum(name.endswith("-program.json") for name in files)
    files |= {f"{number}-{name}": data for name, data in found.items()}
    return number
