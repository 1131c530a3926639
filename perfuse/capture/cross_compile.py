"""`codegen_for`: cross-compile a function for a GPU you do not have."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from perfuse.build.bundle import Bundle, CodeObject, read_bundle
from perfuse.build.triton import assembly_of
from perfuse.cache.access import open_store
from perfuse.candidates.source import CandidateReport
from perfuse.candidates.sources import candidate_reports
from perfuse.capture.failure import eager_call
from perfuse.capture.freeze import refuse_frozen
from perfuse.capture.request import Request
from perfuse.capture.trace import Capture, cut_for
from perfuse.codegen.triton.sources import TritonSources
from perfuse.context import CPU, Context
from perfuse.counters import counters
from perfuse.errors import CannotBuild, ConfigError, Fp8Unavailable, UnsupportedOp
from perfuse.gpu import Platform
from perfuse.graph.copying import GraphCopy, copy_but_for
from perfuse.graph.partition import Cut, Joint, plain_cut
from perfuse.pipeline import Compiled, compile_graph
from perfuse.runtime.host_names import Call
from perfuse.target import Target, target_of
from perfuse.torch_compat.devices import NEEDS_DATA, as_if_on, fake_gpu, faked_on
from perfuse.torch_compat.graphs import GraphKind, tree_leaves, tree_map

GPU = torch.device("cuda", 0)
WITHOUT_DATA = (
    "generate code for the parts before and after it, or compute it without sizes and branches "
    "that depend on data (torch.where, torch.cond)."
)
# What is done with each graph of a call: its kind, the graph, and the context of its target.
Take = Callable[[GraphKind, GraphModule, Context], None]


@dataclass(frozen=True, slots=True)
class GeneratedGraph:
    """One graph's artefacts: its plan, its sources, and the machine code of its kernels."""

    kind: GraphKind
    plan: str
    kernels: str  # the Triton module; for a CPU, the C++ source
    host: str
    objects: tuple[CodeObject, ...]
    assembly: tuple[str, ...]  # of each object
    candidates: tuple[CandidateReport, ...] = ()  # of each matmul, by the sources that list them

    def __str__(self) -> str:
        rows = [
            f"  {o.name}: {o.num_threads} threads, {o.num_registers} registers, "
            f"{o.shared_bytes} bytes shared, {o.stack_bytes} bytes of stack, {len(o.code)} bytes"
            for o in self.objects
        ]
        return "\n".join([f"{self.kind}:", self.plan, *rows, *map(str, self.candidates)])


@dataclass(frozen=True, slots=True)
class Generated:
    """The code generated from a function for a target."""

    target: Target
    graphs: tuple[GeneratedGraph, ...]

    @property
    def objects(self) -> tuple[CodeObject, ...]:
        """The code objects of all graphs."""
        return tuple(made for graph in self.graphs for made in graph.objects)

    @property
    def sources(self) -> list[str]:
        """Every generated source: of each graph the kernels, then the host program."""
        return [text for graph in self.graphs for text in (graph.kernels, graph.host)]

    def written_to(self, folder: Path) -> list[Path]:
        """Write sources, assembly and machine code into a folder; what was written."""
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, bytes] = {}
        for number, graph in enumerate(self.graphs):
            name = f"{number}_{graph.kind}"
            suffix = "cpp" if self.target.gpu is None else "py"
            files[f"{name}_kernels.{suffix}"] = graph.kernels.encode()
            files[f"{name}_host.py"] = graph.host.encode()
            files[f"{name}_plan.txt"] = graph.plan.encode()
            for made, text in zip(graph.objects, graph.assembly, strict=True):
                files[f"{name}_{made.name}.o"] = made.code
                files[f"{name}_{made.name}.s"] = text.encode()
            for place, report in enumerate(graph.candidates):
                file = f"{name}_{report.backend.lower()}{place}"
                files[f"{file}.txt"] = str(report).encode()
                for rank, each in enumerate(report.legal):
                    files[f"{file}_{rank}.cpp"] = each.source.encode()
        for file, data in files.items():
            (folder / file).write_bytes(data)
        return [folder / file for file in files]

    def __str__(self) -> str:
        return "\n\n".join([str(self.target), *map(str, self.graphs)])


def codegen_for(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str,
    dynamic: bool | None = False,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Generated:
    """Generate and compile `fn(*args, **kwargs)` for a target such as "cuda:90" or "hip:gfx942".

    No such GPU is needed, and nothing runs: tensors on any device stand for tensors on that GPU,
    and so do the parameters of a module. If results need gradients, the backward is generated too.
    Such a function, or one with a precision, is traced on the CPU and moved, because PyTorch has
    neither autograd nor autocast for a missing GPU.
    `mode` and `options` are those of `perfuse.compile`, by default those that `fn` was compiled
    with.
    """
    graphs: list[GeneratedGraph] = []
    request = Request.of(fn, mode, options)
    take: Take = lambda *graph: graphs.append(generated(*graph))  # noqa: E731
    chosen = cross_compile(request, args, kwargs or {}, target, dynamic, take)
    return Generated(chosen, tuple(graphs))


def cross_compile(
    request: Request,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: str,
    dynamic: bool | None,
    take: Take,
) -> Target:
    """Pass every graph of a call to `take`, as traced for the named target; returns that target."""
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise ConfigError(
            f"arguments must be a tuple, got a {type(args).__name__}",
            hint="codegen_for(fn, (x,), target=...) compiles fn(x).",
        )
    settings = request.settings()
    refuse_frozen(settings, "a cross-compiled graph")
    chosen = target_of(target, settings)
    device = CPU if chosen.gpu is None else GPU
    backend = CrossCompile([Context(chosen, settings, counters, device)], take)
    given = [list(args), dict(kwargs)]
    is_plain = request.precision is None and not _needs_grad(request.function, given)
    is_traced_there = torch.cuda.is_available() or is_plain
    if not is_traced_there and chosen.gpu is not None:
        _refuse_fp8(request)
    with fake_gpu():
        move = _Mover(device if is_traced_there else CPU)
        function = move.module(request.function)
        positional, named = tree_map(move.tensor, given)
        moved = dataclasses.replace(request, function=function, is_dynamic=dynamic)
        if request.precision is not None:
            moved = dataclasses.replace(moved, precision=request.precision.of_copy(function))
        try:
            moved.call(positional, named, backend)
        except NEEDS_DATA as error:
            message = f"the function needs the result of {error}, and nothing runs here"
            raise UnsupportedOp(message, hint=WITHOUT_DATA) from error
    return chosen


def _refuse_fp8(request: Request) -> None:
    """PyTorch traces a precision for the GPU that is there; a CPU emulates FP8."""
    if request.precision is not None and not isinstance(request.precision.way, torch.dtype):
        raise Fp8Unavailable(
            "an FP8 recipe cannot be compiled for a GPU that is not there",
            hint="use precision='bf16', or call codegen_for on a machine with a GPU.",
        )


def _needs_grad(fn: Any, given: Any) -> bool:
    held = list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []
    tensors = [v for v in (*held, *tree_leaves(given)) if isinstance(v, torch.Tensor)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class _Mover:
    """Makes fake tensors on the device, one for each tensor that it meets."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made: dict[int, torch.Tensor] = {}

    def tensor(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.made:
            self.made[id(value)] = faked_on(self.device, value)
        return self.made[id(value)]

    def module(self, fn: Any) -> Any:
        """A copy of a module with its parameters on the device; a function as it is."""
        if not isinstance(fn, torch.nn.Module):
            return fn
        held = (*fn.parameters(), *fn.buffers())
        return copy.deepcopy(fn, {id(tensor): self.tensor(tensor) for tensor in held})


def moved_graph(module: GraphModule, device: torch.device) -> GraphModule:
    """The graph as if it had been traced on the device; unchanged if it was."""
    values = [node.meta.get("val") for node in module.graph.nodes]
    tensors = [v for v in tree_leaves(values) if isinstance(v, torch.Tensor)]
    if device == CPU or any(tensor.device == device for tensor in tensors):
        return module

    def moved(node: Node, new: GraphCopy) -> Node:
        made = new.copy(node)
        made.kwargs = {k: device if v == CPU else v for k, v in made.kwargs.items()}
        made.meta["val"] = as_if_on(device, node.meta.get("val"))
        return made

    return copy_but_for(module, moved)


@dataclass(frozen=True, slots=True, eq=False)
class CrossCompile:
    """A Dynamo backend for machines that need not be present: captured code runs eagerly.

    `take` gets every graph with its kind and context, as traced for the target of that context.
    """

    # Dynamo puts the representation of a backend before the message of each of its errors.
    contexts: Sequence[Context] = field(repr=False)  # which differ in targets, not in settings
    take: Take = field(repr=False)

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return Capture(self.contexts[0], self._cut, self._run).trace(module, inputs)

    def _cut(self, joint: GraphModule, num_results: int) -> Cut:
        """Pass on both halves, cut for each target; to run the function, any cut will do."""
        for context in self.contexts:
            cut, _ = cut_for(context, moved_graph(joint, context.device), num_results)
            self.take(GraphKind.BACKWARD, cut.backward, context)
            self.take(GraphKind.FORWARD, cut.forward, context)
        context = self.contexts[0]
        return plain_cut(Joint.of(joint, num_results, context), context.settings)

    def _run(self, kind: GraphKind, graph: GraphModule) -> Call:
        if kind is GraphKind.INFERENCE:
            for context in self.contexts:
                self.take(kind, moved_graph(graph, context.device), context)
        return eager_call(graph)


def generated(kind: GraphKind, graph: GraphModule, context: Context) -> GeneratedGraph:
    """The graph compiled for the target of a context, as text and machine code."""
    made = compile_graph(graph, context, loads=False)
    bundle, assembly = _code(made, context)
    kernels, host = "\n".join(made.texts()[:-1]), made.host.text
    return GeneratedGraph(
        kind=kind,
        plan=str(made.plan),
        kernels=kernels,
        host=host,
        objects=bundle.objects,
        assembly=assembly,
        candidates=candidate_reports(made.plan.program, context),
    )


def _code(made: Compiled, context: Context) -> tuple[Bundle, tuple[str, ...]]:
    gpu = context.target.gpu
    if gpu is None or not isinstance(made.sources, TritonSources) or made.library is None:
        return Bundle(Platform.CPU, ""), ()
    entry = open_store(context).get(made.library)
    if entry is None:
        raise CannotBuild("the bundle that was just built cannot be read back")
    return read_bundle(entry.read_bytes), tuple(assembly_of(made.sources, gpu, context))
