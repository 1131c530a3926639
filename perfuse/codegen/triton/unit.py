"""`generate_triton`: every distinct kernel of a Plan once, in one module, and its launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from perfuse.codegen.triton import blocks
from perfuse.codegen.triton.batch import batch_texts, batch_tile
from perfuse.codegen.triton.carry import join_columns, joins_itself
from perfuse.codegen.triton.emit import Dialect
from perfuse.codegen.triton.frame import KernelText, TritonFrame
from perfuse.codegen.triton.helpers import helper_text
from perfuse.codegen.triton.quantised import quantising_kernels
from perfuse.codegen.triton.rows import rows_text
from perfuse.codegen.triton.scan import scan_text
from perfuse.codegen.triton.sources import (
    HostLaunch,
    HostUnit,
    Launch,
    TritonKernel,
    TritonSources,
    unit_name,
)
from perfuse.codegen.triton.split import split_texts
from perfuse.codegen.triton.templates.attention import (
    attention_texts,
    attention_tile,
    smaller_attention,
)
from perfuse.codegen.triton.templates.template import SOURCE, Template
from perfuse.codegen.triton.templates.texts import template_texts
from perfuse.codegen.triton.tiling import GpuLimits, choose_tile, smaller, widest_of
from perfuse.context import Context
from perfuse.errors import KernelTooLarge
from perfuse.gpu import Platform
from perfuse.ir.dtype import DType
from perfuse.ir.program import Buffer
from perfuse.schedule.plan import Kernel, Plan, Role
from perfuse.schedule.tile import Tile, TileKind
from perfuse.target import Target
from perfuse.torch_compat.ops import fp8_cast_saturates

HEADER = """import triton
import triton.language as tl
from triton.language.extra import libdevice
"""
# Added to the header of a module with a kernel in Gluon.
GLUON_HEADER = """from triton.experimental import gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia import hopper
"""

_ONE_LAUNCH = {
    TileKind.FLAT: blocks.flat_text,
    TileKind.GROUPED: blocks.grouped_text,
    TileKind.STACKED: blocks.stacked_text,
    TileKind.TRANSPOSED: blocks.transposed_text,
    TileKind.SCATTER: blocks.scatter_text,
    TileKind.SCAN: scan_text,
    TileKind.ROWS: rows_text,
    TileKind.COLUMNS: blocks.columns_text,
}


# Writes a contraction as its choice in the plan says: functions of the module, or a host call.
WriteContraction = Callable[[Kernel, Plan, Dialect, Context], Sequence[KernelText] | HostLaunch]


def write_template(
    kernel: Kernel, plan: Plan, dialect: Dialect, context: Context
) -> Sequence[KernelText]:
    """A contraction as a Triton template computes it."""
    template = Template.of(plan.templates[kernel.name])
    return template_texts(kernel, plan.program.buffers, template, dialect)


# By the source of a choice.
WRITERS: Mapping[str, WriteContraction] = MappingProxyType({SOURCE: write_template})


def generate_triton(
    plan: Plan, context: Context, writers: Mapping[str, WriteContraction] = WRITERS
) -> TritonSources:
    """Generate the kernels of a plan; equal ones share a function. Its tiles take precedence."""
    dialect = dialect_of(context)
    exact = replace(dialect, is_exact=not dialect.approximates)
    quantising, module = quantising_kernels(plan), _Module()
    for kernel in plan.kernels:
        own = exact if kernel.name in quantising else dialect
        if kernel.contraction is None:
            module.add(_texts_of(kernel, plan, tile_of(kernel, plan, context), own))
            continue
        source = plan.templates[kernel.name].source
        written = writers[source](kernel, plan, own, context)
        if isinstance(written, HostLaunch):
            module.add_call(written, source)
        else:
            module.add(written)
    return module.sources()


class _Module:
    """Functions and libraries of host calls, each distinct one once, and the launches so far."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], TritonKernel] = {}
        self._functions: list[str] = []
        self._units: dict[tuple[str, str], HostUnit] = {}
        self._launches: list[tuple[Launch, ...]] = []

    def add(self, texts: Sequence[KernelText]) -> None:
        """The launches of a kernel that is functions of the module."""
        steps = []
        for text in texts:
            made = self._function(text)
            passed = (text.buffers, text.symbols, text.grid, text.scratch, text.maps)
            steps.append(Launch(made.name, *passed))
        self._launches.append(tuple(steps))

    def add_call(self, made: HostLaunch, source: str) -> None:
        """The launch of a kernel that is a host call."""
        new = HostUnit(unit_name(len(self._units)), made.text, source)
        unit = self._units.setdefault((source, made.text), new)
        self._launches.append((Launch(unit.name, made.buffers, (), (1, 1, 1), call=made.call),))

    def _function(self, text: KernelText) -> TritonKernel:
        tile = text.tile
        constants = (("R", tile.rows), ("C", tile.columns))
        threads = (tile.num_warps, tile.num_stages)
        key = (text.parameters, text.body, text.called, text.promised, constants, threads)
        if key not in self._known:
            name = f"kernel{len(self._known)}"
            inner = ", ".join(
                [*(p for p, _ in text.parameters), "R: tl.constexpr", "C: tl.constexpr"]
            )
            language = "gluon" if text.is_gluon else "triton"
            own = f"\n\n@{language}.jit\ndef {name}({inner}):\n{text.body}"
            self._functions.append((text.called + own).replace("KERNEL", name))
            pointers = frozenset(p for p, kind in text.parameters if kind.startswith("*"))
            divisible = pointers | text.promised
            self._known[key] = TritonKernel(name, text.parameters, constants, divisible, *threads)
        return self._known[key]

    def sources(self) -> TritonSources:
        code = "".join(self._functions)
        header = HEADER + (GLUON_HEADER if "@gluon.jit" in code else "")
        text = header + helper_text(code, saturate=fp8_cast_saturates()) + code
        kernels, launches = tuple(self._known.values()), tuple(self._launches)
        return TritonSources(text, kernels, launches, tuple(self._units.values()))


def tile_of(kernel: Kernel, plan: Plan, context: Context) -> Tile:
    """The tile in the plan, or else the model's choice."""
    if kernel.name in plan.tiles:
        return plan.tiles[kernel.name]
    if kernel.attention is not None:
        program, limits = plan.program, limits_of(context.target)
        return attention_tile(kernel.attention, program.buffers, program.hints, limits)
    if kernel.batch is not None:
        return batch_tile(kernel.batch, limits_of(context.target))
    widest = widest_of(kernel, plan.program.buffers)
    return choose_tile(kernel, limits_of(context.target), widest)


def retiled(plan: Plan, sources: TritonSources, error: KernelTooLarge, context: Context) -> Plan:
    """The plan with smaller tiles for the kernels in the error; raises it if none is smaller."""
    tiles = dict(plan.tiles)
    for kernel, launches in zip(plan.kernels, sources.launches, strict=True):
        if any(launch.kernel in error.kernels for launch in launches):
            is_fixed = kernel.contraction is not None  # its template was chosen as it is
            step = smaller if kernel.attention is None else smaller_attention
            less = None if is_fixed else step(tile_of(kernel, plan, context))
            if less is None:
                raise error
            tiles[kernel.name] = less
    return replace(plan, tiles=tiles)


def _texts_of(kernel: Kernel, plan: Plan, tile: Tile, dialect: Dialect) -> list[KernelText]:
    if kernel.batch is not None:
        return batch_texts(kernel, tile, dialect, plan.places)
    if kernel.attention is not None:
        return attention_texts(kernel, plan.program.buffers, tile, dialect)
    return kernel_texts(kernel, plan.program.buffers, tile, dialect)


def kernel_texts(
    kernel: Kernel, buffers: Mapping[str, Buffer], tile: Tile, dialect: Dialect
) -> list[KernelText]:
    """The functions that run one kernel, in order, cut as a tile says."""
    texts = _texts(kernel, buffers, tile, dialect)
    if any(t.checks_indices for t in texts) and not dialect.pipelines_assertions:
        return _texts(kernel, buffers, replace(tile, num_stages=1), dialect)
    return texts


def _texts(
    kernel: Kernel, buffers: Mapping[str, Buffer], tile: Tile, dialect: Dialect
) -> list[KernelText]:
    frame = TritonFrame(kernel, buffers, tile, dialect)
    if tile.kind is TileKind.SPLIT:
        return split_texts(frame)
    texts = [_ONE_LAUNCH[tile.kind](frame)]
    sharing = tile.splits if tile.kind is TileKind.COLUMNS else tile.programs or 1
    is_left = (sharing > 1 or tile.is_swept) and not joins_itself(tile, frame.size(frame.columns))
    if is_left and any(m.role == Role.OUTER for m in kernel.members):
        texts.append(join_columns(kernel, frame, sharing, dialect))
    return texts


def limits_of(target: Target) -> GpuLimits:
    gpu = target.gpu
    if gpu is None:
        return GpuLimits()
    return GpuLimits(gpu.multiprocessors, gpu.warp, gpu.shared_bytes)


def dialect_of(context: Context) -> Dialect:
    """The interpreter's own float8 conversions differ, so it gets the bitwise ones."""
    settings, gpu = context.settings.gpu, context.target.gpu
    if settings.interpret:
        return Dialect(rounds_bf16=False, approximates=settings.approximate)
    is_native = gpu is not None and gpu.capability >= 89
    return Dialect(
        frozenset({DType.F8E4M3FN, DType.F8E5M2}) if is_native else frozenset(),
        # Triton's pipeliner for AMD ends the process at an assertion in a loop that it pipelines.
        pipelines_assertions=context.target.kind is not Platform.HIP,
        maps_on_host=gpu is not None and gpu.capability >= 90,
        approximates=settings.approximate,
    )
