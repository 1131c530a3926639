"""`aot_compile`: a function with its parameters, compiled to an artefact on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from perfuse import config
from perfuse.build.compiler import LIBRARY as BUILT
from perfuse.build.compiler import open_store
from perfuse.capture.device import device_of
from perfuse.capture.simple import facts_of
from perfuse.capture.trace import trace
from perfuse.config import Settings
from perfuse.context import Context
from perfuse.errors import ArtefactError
from perfuse.graph.canonical import is_storable
from perfuse.graph.partition import partition_joint
from perfuse.pipeline import Compiled, compile_graph
from perfuse.runtime.artefact import ARTEFACT, LIBRARY, PARAMETERS, write_artefact
from perfuse.runtime.saved import SavedProgram, files_of, pack_tensors
from perfuse.runtime.tree import describe
from perfuse.runtime.wrapper import Facts, wrap
from perfuse.torch_compat import reset_dynamo, tree_leaves


@dataclass(slots=True)
class Capture:
    """The one graph of a function: what went in, what it compiled to, what came out."""

    settings: Settings
    context: Context | None = None  # known once the graph's device is
    graphs: list[Compiled] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    facts: Facts | None = None

    def backend(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend: compiles as always, and keeps what passes by."""
        if self.graphs:
            raise ArtefactError("the function needs more than one graph", hint=ONE_GRAPH)
        context = self.context = Context.on(device_of(module, inputs), self.settings)
        modules: dict[str, GraphModule] = {}

        def compile_one(kind: str, graph: GraphModule) -> Any:
            modules[kind] = graph
            self.graphs.append(compile_graph(graph, context))
            return self.graphs[-1].call

        trace(
            module,
            inputs,
            self.settings,
            compiler=compile_one,
            partition=partial(partition_joint, settings=self.settings),
        )
        self.facts = facts_of(modules, len(inputs), context)
        if self.facts is None:
            raise ArtefactError("the function returns views of its arguments", hint=NO_VIEWS)
        run = wrap(self.graphs[0].call, None, self.facts)

        def call(*args: Any) -> Any:
            self.inputs, self.results = list(args), list(run(*args))
            return self.results

        return call


ONE_GRAPH = "fullgraph: torch._dynamo.explain shows what breaks the graph."
NO_VIEWS = "return copies (.clone()), and tensors of known sizes."


def aot_compile(
    fn: Callable[..., Any],
    args: Sequence[Any],
    path: str | Path | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Path:
    """Compile `fn(*args, **kwargs)` for inference into the folder `path`, and say where it is.

    What `fn` holds (parameters, buffers, tensors it closes over) goes into the artefact as it is
    now. `perfuse.load(path)` runs it in a new process without tracing. Sizes are fixed.
    """
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise ArtefactError(
            f"the arguments come in a tuple, not as a {type(args).__name__}",
            hint="aot_compile(fn, (x,)) compiles fn(x).",
        )
    if dynamic:
        raise ArtefactError(
            "an artefact has fixed sizes", hint="compile one for each size, or use torch.compile."
        )
    capture = Capture(config.snapshot())
    reset_dynamo()
    with torch.no_grad():
        compiled = torch.compile(fn, backend=capture.backend, fullgraph=True, dynamic=False)
        result = compiled(*args, **(kwargs or {}))
    reset_dynamo()
    context = capture.context
    if not capture.graphs or context is None:
        raise ArtefactError("the function computes nothing with tensors")
    name = getattr(fn, "__name__", type(fn).__name__)
    made = Path(path) if path is not None else Path(f"{name}.perfuse")
    files = _files(capture, [list(args), dict(kwargs or {})], result, name)
    files |= _program_files(capture.graphs[0], context)
    write_artefact(made, files, context.target.isa, _gpu_arch(context))
    return made


def _files(capture: Capture, arguments: Any, result: Any, name: str) -> dict[str, bytes]:
    given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    numbers = {id(tensor): number for number, tensor in enumerate(given)}
    held: dict[str, torch.Tensor] = {}
    places = [_place(value, numbers, held) for value in capture.inputs]
    facts = capture.facts
    assert facts is not None
    written = {id(capture.inputs[i]) for i in facts.written}
    rows, parameters = pack_tensors(held)
    document = {
        "name": name,
        "arguments": describe(arguments, lambda tensor: numbers[id(tensor)]),
        "tensors": [_row(tensor, id(tensor) in written) for tensor in given],
        "inputs": places,
        "held": rows,
        "results": describe(result, _Places([*capture.results, *given])),
    }
    return {ARTEFACT: json.dumps(document).encode(), PARAMETERS: parameters}


def _gpu_arch(context: Context) -> str:
    """The GPU that an artefact is for; none where the code can be interpreted."""
    gpu = context.target.gpu
    return "" if gpu is None or context.device.type == "cpu" else gpu.arch


def _place(value: Any, numbers: dict[int, int], held: dict[str, torch.Tensor]) -> list[Any]:
    """Where an input of the graph comes from: an argument, or what the function holds."""
    if id(value) in numbers:
        return ["argument", numbers[id(value)]]
    if not isinstance(value, torch.Tensor):
        raise ArtefactError(f"the graph depends on a {type(value).__name__}", hint=NO_VIEWS)
    name = f"p{len(held)}"
    held[name] = value.detach()
    return ["held", name]


def _row(tensor: torch.Tensor, is_written: bool) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "device": str(tensor.device),
        "is_written": is_written,
    }


class _Places:
    """The number of a result: of those the graph gave, and after these the arguments."""

    def __init__(self, known: list[Any]) -> None:
        self.known = known

    def __call__(self, tensor: torch.Tensor) -> int:
        for number, value in enumerate(self.known):
            if value is tensor:
                return number
        raise ArtefactError("a result does not come out of the graph", hint=NO_VIEWS)


def _program_files(compiled: Compiled, context: Context) -> dict[str, bytes]:
    constants = compiled.program.constants
    if not all(is_storable(value) for value in constants.values()):
        raise ArtefactError("the graph holds something that cannot be kept as data")
    saved = SavedProgram(compiled.host, None, constants, compiled.counts, str(compiled.plan))
    files = files_of(saved)
    if compiled.library is not None:
        entry = open_store(context).get(compiled.library)
        assert entry is not None, "the library was built a moment ago"
        renamed = {BUILT: LIBRARY} if compiled.host.gpu is None else {n: n for n in entry.files}
        files |= {name: entry.read_bytes(held) for held, name in renamed.items()}
    return files
