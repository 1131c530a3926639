"""`Explanation`: the artefacts of every graph that a call compiled, readable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfuse.errors import PerfuseError
from perfuse.ir.program import Extern
from perfuse.pipeline import Compiled
from perfuse.report.memory import TrainingReport, draw
from perfuse.report.tables import html_page, rendered
from perfuse.schedule.plan import Kernel


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel: how much it moves and computes, and which loops it was fused from."""

    name: str
    num_bytes: int
    num_flops: int
    members: tuple[str, ...]
    origins: tuple[str, ...]  # the user's lines

    @staticmethod
    def of(kernel: Kernel) -> KernelRow:
        loops = [member.loop for member in kernel.members]
        return KernelRow(
            kernel.name,
            kernel.num_bytes,
            kernel.num_flops,
            tuple(f"{loop.out}: {loop.kind}" for loop in loops),
            tuple(dict.fromkeys(loop.origin for loop in loops if loop.origin)),
        )


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operator that runs in ATen, and why."""

    op: str
    reason: str
    origin: str


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph: each room's artefact as text, and the rows drawn from them."""

    name: str
    graph: str
    program: str
    plan: str
    kernels: tuple[KernelRow, ...]
    refusals: tuple[str, ...]
    fallbacks: tuple[Fallback, ...]
    seconds: dict[str, float]
    sources: tuple[str, ...]

    @staticmethod
    def of(compiled: Compiled, number: int) -> GraphReport:
        nodes = compiled.module.graph.nodes
        is_backward = any(node.meta.get("autograd_backward") for node in nodes)
        externs = [step for step in compiled.plan.steps if isinstance(step, Extern)]
        return GraphReport(
            f"graph {number} ({'backward' if is_backward else 'forward'})",
            "\n".join(_line(node) for node in nodes),
            str(compiled.program),
            str(compiled.plan),
            tuple(KernelRow.of(kernel) for kernel in compiled.plan.kernels),
            tuple(str(refusal) for refusal in compiled.plan.refusals),
            tuple(Fallback(step.op, step.reason, step.origin) for step in externs),
            compiled.seconds,
            compiled.texts(),
        )


def _line(node: Any) -> str:
    value = node.meta.get("val")
    shape = f"  # {value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else ""
    if node.op in ("placeholder", "get_attr"):
        return f"{node.name} = {node.op}{shape}"
    words = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
    if node.op == "output":
        return f"return {', '.join(words)}"
    return f"{node.name} = {node.target}({', '.join(words)}){shape}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a call compiled to. `print` it, or ask it."""

    graphs: tuple[GraphReport, ...]
    counters: dict[str, int]
    seconds: float  # the whole first call, capture included
    training: tuple[TrainingReport, ...] = ()  # each capture that has a backward

    @property
    def sources(self) -> list[str]:
        """Every generated source: of each graph the C++, then the host program."""
        return [text for graph in self.graphs for text in graph.sources]

    @property
    def num_kernels(self) -> int:
        return sum(len(graph.kernels) for graph in self.graphs)

    def __str__(self) -> str:
        return rendered(self)

    def to_png(self, path: str | Path) -> Path:
        """Draw memory over time, for each capture that has a backward."""
        if not self.training:
            raise PerfuseError("nothing here has a backward, whose memory could be drawn")
        return draw(self.training, path)

    def to_html(self, path: str | Path) -> Path:
        """Write the explanation as one HTML page."""
        made = Path(path)
        made.write_text(html_page(self))
        return made
