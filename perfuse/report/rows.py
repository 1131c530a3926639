"""The rows of a report: the kernels and library calls of a graph, with their origins."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch.fx import Node

from perfuse.config import Settings, describe
from perfuse.decision import Decision
from perfuse.graph.saving.costs import Work, num_flops, work_of
from perfuse.ir.matmul import matmul_op
from perfuse.ir.program import LibraryCall, Matmul, Origin
from perfuse.pipeline import Compiled
from perfuse.report.roofline import Roofline, contraction_flops, kernel_bytes, kernel_flops
from perfuse.schedule.plan import Kernel
from perfuse.torch_compat.graphs import GraphKind
from perfuse.torch_compat.records import op_identity


class LibraryKind(StrEnum):
    """The subjects of vendor libraries."""

    ATTENTION, CONVOLUTION = "attention", "convolution"
    RECURRENT, MATMUL = "recurrent", "matmul"
    FALLBACK = ""  # not a library call: the op has no lowering


# Ops for which vendor libraries beat generated code, by words in their names.
LIBRARIES = {
    LibraryKind.ATTENTION: ("attention", "flash", "cudnn_sdp"),
    LibraryKind.CONVOLUTION: ("convolution", "conv1d", "conv2d", "conv3d", "conv_transpose"),
    LibraryKind.RECURRENT: ("lstm", "gru", "rnn"),
    LibraryKind.MATMUL: ("mm", "linear"),  # beside those of the table: _scaled_mm
}


def library_kind(op: str) -> LibraryKind:
    """The kind of library call that an op is."""
    if matmul_op(op) is not None:
        return LibraryKind.MATMUL
    name = op.split(".")[1] if "." in op else op
    words = {name, *name.split("_")}
    for kind, known in LIBRARIES.items():
        if words & set(known) or (kind is LibraryKind.CONVOLUTION and "convolution" in name):
            return kind
    return LibraryKind.FALLBACK


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel: bytes, flops, the loops it was fused from, and their source lines."""

    name: str
    num_bytes: int
    num_flops: int
    seconds: float  # at the roofline, a lower bound
    members: tuple[str, ...]
    origins: tuple[str, ...]  # the user's lines, the most frequent first
    modules: tuple[str, ...]  # likewise: layers.3.mlp
    ops: tuple[str, ...]

    @staticmethod
    def of(kernel: Kernel, compiled: Compiled, roofline: Roofline) -> "KernelRow":
        loops = [member.loop for member in kernel.members]
        matmuls = () if kernel.contraction is None else kernel.contraction.matmuls
        hints = compiled.program.hints
        moved, computed = kernel_bytes(kernel, compiled.program), kernel_flops(kernel, hints)
        own = () if kernel.attention is None else (kernel.attention,)
        grouped = () if kernel.grouped is None else (kernel.grouped,)
        origins = [node.origin for node in (*matmuls, *own, *grouped, *loops)]
        return KernelRow(
            name=kernel.name,
            num_bytes=moved,
            num_flops=computed,
            seconds=roofline.seconds(moved, computed, contraction_flops(kernel, hints)),
            members=(
                *(f"{matmul.out}: matmul" for matmul in matmuls),
                *(f"{node.results[0]}: {node.part}" for node in own),
                *(f"{node.outs[0]}: matmuls of groups" for node in grouped),
                *(f"{loop.out}: {loop.kind}" for loop in loops),
            ),
            origins=_by_frequency([origin.line for origin in origins]),
            modules=_by_frequency([origin.module for origin in origins]),
            ops=tuple(dict.fromkeys(op for origin in origins for op in origin.ops)),
        )


def _by_frequency(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name, _ in Counter(filter(None, names)).most_common())


@dataclass(frozen=True, slots=True)
class CallRow:
    """An op that runs as a PyTorch call inside the program, and why."""

    op: str
    reason: str
    origin: str  # the user's line
    module: str
    kind: LibraryKind

    @staticmethod
    def of(step: LibraryCall) -> "CallRow":
        origin: Origin = step.origin
        kind = LibraryKind.MATMUL if isinstance(step, Matmul) else library_kind(step.op)
        return CallRow(step.op, step.reason, origin.line, origin.module, kind)


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph: the artefact of each stage as text, and the rows derived from them."""

    name: str
    is_backward: bool
    num_ops: int  # of the user's program, views left out
    target: str
    settings: tuple[str, ...]  # those that are not at their default
    sizes: dict[str, int]  # symbols of dynamic sizes, and their values here
    graph: str
    program: str
    plan: str
    kernels: tuple[KernelRow, ...]
    refusals: tuple[str, ...]
    calls: tuple[CallRow, ...]
    decisions: tuple[Decision, ...]
    library_flops: dict[LibraryKind, int]
    seconds: dict[str, float]  # by stage
    sources: tuple[str, ...]  # C++ or Triton, then the host program

    @staticmethod
    def of(compiled: Compiled, number: int) -> "GraphReport":
        nodes = list(compiled.module.graph.nodes)
        roofline = Roofline.of(compiled.context.target)
        calls = [step for step in compiled.plan.steps if isinstance(step, LibraryCall)]
        return GraphReport(
            name=f"graph {number} ({compiled.kind})",
            is_backward=compiled.kind is GraphKind.BACKWARD,
            num_ops=num_ops(nodes),
            target=str(compiled.context.target),
            settings=changed_settings(compiled.context.settings),
            sizes=dict(compiled.program.hints),
            graph="\n".join(_line(node) for node in nodes),
            program=str(compiled.program),
            plan=str(compiled.plan),
            kernels=tuple(
                KernelRow.of(kernel, compiled, roofline) for kernel in compiled.plan.kernels
            ),
            refusals=tuple(str(refusal) for refusal in compiled.plan.refusals),
            calls=tuple(CallRow.of(call) for call in calls),
            decisions=compiled.decisions,
            library_flops=_library_flops(nodes, compiled),
            seconds=compiled.seconds,
            sources=compiled.texts(),
        )

    @property
    def fallbacks(self) -> tuple[CallRow, ...]:
        """Ops that Perfuse could not compile."""
        return tuple(call for call in self.calls if call.kind is LibraryKind.FALLBACK)

    @property
    def library_calls(self) -> tuple[CallRow, ...]:
        return tuple(call for call in self.calls if call.kind is not LibraryKind.FALLBACK)


def num_ops(nodes: Sequence[Node]) -> int:
    """The number of ops of the user's program; the parts of a decomposed op count once."""
    work = [n for n in nodes if n.op == "call_function" and work_of(n) is not Work.FREE]
    return len({op_identity(node) for node in work})


def changed_settings(settings: Settings) -> tuple[str, ...]:
    """The settings that differ from their defaults, as options; cache and build are left out."""
    return tuple(
        f"{row.name}={settings.get(row.name)!r}"
        for row in describe()
        if settings.get(row.name) != row.default and not row.name.startswith(("cache.", "build."))
    )


def _library_flops(nodes: Sequence[Node], compiled: Compiled) -> dict[LibraryKind, int]:
    """Operations of library calls by kind, without matmuls that are generated kernels."""
    found: Counter[LibraryKind] = Counter()
    hints = compiled.program.hints
    kernels = [k for k in compiled.plan.kernels if k.attention is None and k.grouped is None]
    found[LibraryKind.MATMUL] -= sum(contraction_flops(kernel, hints) for kernel in kernels)
    for node in nodes:
        kind = library_kind(str(node.target))
        if node.op == "call_function" and kind is not LibraryKind.FALLBACK:
            found[kind] += num_flops(node)
    return {kind: count for kind, count in found.items() if count > 0}


def _line(node: Any) -> str:
    value = node.meta.get("val")
    shape = f"  # {value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else ""
    if node.op in ("placeholder", "get_attr"):
        return f"{node.name} = {node.op}{shape}"
    words = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
    if node.op == "output":
        return f"return {', '.join(words)}"
    return f"{node.name} = {node.target}({', '.join(words)}){shape}"
