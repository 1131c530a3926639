"""Every source and host program of a program for each target, generated and not built.

Targets are spelled out, never those of the machine, and folders of this checkout are replaced by
their names: the same text comes out everywhere. Graphs are traced once, on the CPU, and moved to a
GPU that need not be there, as `codegen_for` does it.
"""

from __future__ import annotations

import functools
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from perfuse.backends import backend_of
from perfuse.capture.cross_compile import GPU, CrossCompile
from perfuse.codegen import cpp
from perfuse.config import CpuSettings, Settings
from perfuse.context import CPU, Context
from perfuse.counters import Counters
from perfuse.gpu import Platform, gpu_of_name
from perfuse.pipeline import plan_graph
from perfuse.target import LANES, Target
from tests.replay.corpus import HEADERS, play


def cpu_with(isa: str) -> Target:
    """Two cores of a server CPU."""
    caches = {"l1_bytes": 32 << 10, "l2_bytes": 1 << 20, "l3_bytes": 32 << 20}
    return Target(
        Platform.CPU, "x86_64", isa, LANES[isa], 2, **caches, compiler="", compiler_version=""
    )


def cpu_beside(name: str) -> Target:
    """The same CPU with a GPU of this name."""
    gpu = gpu_of_name(name)
    return replace(cpu_with("avx2"), kind=gpu.kind, gpu=gpu)


TARGETS: dict[str, Callable[[], Target]] = {
    "avx2": functools.partial(cpu_with, "avx2"),
    "avx512": functools.partial(cpu_with, "avx512"),
    "sm_90": functools.partial(cpu_beside, "sm_90"),
    "gfx942": functools.partial(cpu_beside, "gfx942"),
}


# A host program names the user's source lines in its messages. The environment may lie inside the
# checkout, so it is replaced first.
FOLDERS = {
    sysconfig.get_path("purelib"): "<site-packages>",
    str(Path(__file__).resolve().parents[2]): "<checkout>",
}


# What is measured differs from run to run.
UNTUNED = Settings(cpu=CpuSettings(tune_matmuls=False))


@dataclass
class Recorder:
    """Dynamo's backend: generates each graph for every target, and runs it in eager."""

    settings: Settings
    texts: dict[str, str] = field(default_factory=dict)  # by "target/number_kind.part"
    num_graphs: int = 0

    def backend(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        traced = CrossCompile([*self._contexts()], self._add)(module, inputs)
        self.num_graphs += 1
        return traced

    def _contexts(self) -> Iterator[Context]:
        for make in TARGETS.values():
            target = make()
            device = CPU if target.gpu is None else GPU
            yield Context(target, self.settings, Counters(), device)

    def _add(self, kind: str, graph: GraphModule, context: Context) -> None:
        gpu = context.target.gpu
        name = f"{context.target.isa if gpu is None else gpu.arch}/{self.num_graphs}_{kind}"
        for part, text in generated(graph, context).items():
            self.texts[f"{name}.{part}"] = text


def generated(graph: GraphModule, context: Context) -> dict[str, str]:
    """The kernels and the host program of one graph."""
    plan, backend = plan_graph(graph, context).plan, backend_of(context.target)
    sources = backend.generate(plan, context)
    return {
        "kernels": "\n".join(sources.texts),
        "host": backend.host(plan, sources, context).text,
    }


def texts_of(name: str) -> dict[str, str]:
    """Everything that is generated for the program of this name; what all C++ kernels include."""
    if name == HEADERS:
        folder = Path(cpp.__file__).parent
        return {f"cpp/{path.name}": path.read_text() for path in sorted(folder.glob("*.h"))}
    recorder = Recorder(UNTUNED)

    def compiled(function: Any, *, dynamic: bool | None = False) -> Any:
        return torch.compile(function, backend=recorder.backend, dynamic=dynamic)

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        play(name, compiled)
    return {part: without_folders(text) for part, text in recorder.texts.items()}


def without_folders(text: str) -> str:
    for folder, name in FOLDERS.items():
        text = text.replace(folder, name)
    return text
