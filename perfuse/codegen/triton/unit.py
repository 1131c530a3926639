"""`generate_triton`: every distinct kernel of a Plan once, in one module, and its launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from perfuse.codegen.ck.launch import SOURCE as CK
from perfuse.codegen.ck.launch import CkUnits
from perfuse.codegen.ck.problem import arch_of_name
from perfuse.codegen.triton import blocks
from perfuse.codegen.triton.batch import batch_texts, batch_tile
from perfuse.codegen.triton.carry import join_columns, joins_itself
from perfuse.codegen.triton.emit import Dialect
from perfuse.codegen.triton.frame import KernelText, TritonFrame
from perfuse.codegen.triton.helpers import helper_text
from perfuse.codegen.triton.quantised import quantising_kernels
from perfuse.codegen.triton.rows import rows_text
from perfuse.codegen.triton.scan import scan_text
from perfuse.codegen.triton.sources import Launch, TritonKernel, TritonSources
from perfuse.codegen.triton.split import split_texts
from perfuse.codegen.triton.templates.attention import (
    attention_texts,
    attention_tile,
    smaller_attention,
)
from perfuse.codegen.triton.templates.template import Template
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


def generate_triton(plan: Plan, context: Context) -> TritonSources:
    """Generate the kernels of a plan; equal ones share a function. Its tiles take precedence."""
    dialect = dialect_of(context)
    exact = replace(dialect, is_exact=not dialect.approximates)
    quantising = quantising_kernels(plan)
    known: dict[tuple[object, ...], TritonKernel] = {}
    functions: list[str] = []
    launches: list[tuple[Launch, ...]] = []
    calls = CkUnits(plan.program.buffers, ck_arch(context))
    for kernel in plan.kernels:
        choice = plan.templates.get(kernel.name)
        if choice is not None and choice.source == CK:
            launches.append((calls.launch(kernel, choice),))
            continue
        steps = []
        tile = tile_of(kernel, plan, context)
        own = exact if kernel.name in quantising else dialect
        for text in _texts_of(kernel, plan, tile, own):
            made = _function(text, known, functions)
            passed = (text.buffers, text.symbols, text.grid, text.scratch, text.maps)
            steps.append(Launch(made.name, *passed))
        launches.append(tuple(steps))
    code = "".join(functions)
    header = HEADER + (GLUON_HEADER if "@gluon.jit" in code else "")
    module = header + helper_text(code, saturate=fp8_cast_saturates()) + code
    return TritonSources(module, tuple(known.values()), tuple(launches), calls.units)


def ck_arch(context: Context) -> str:
    """The GPU that Composable Kernel is compiled for: the setting's, else the target's."""
    gpu = context.target.gpu
    return arch_of_name(context.settings.rocm.arch) or ("" if gpu is None else gpu.arch)


def tile_of(kernel: Kernel, plan: Plan, context: Context) -> Tile:
    """The tile in the plan, or else the model's choice."""
    if kernel.name in plan.tiles:
        return plan.tiles[kernel.name]
    if kernel.contraction is not None:
        return Template.of(plan.templates[kernel.name]).tile
    if kernel.attention is not None:
        program, limits = plan.program, limits_of(context.target)
        return attention_tile(kernel.attention, program.buffers, program.hints, limits)
    if kernel.batch is not None:
        return batch_tile(kernel.batch, limits_of(context.target))
    widest = widest_of(kernel, plan.program.buffers)
    return choose_tile(kernel, limits_of(context.target), widest)


def retiled(plan: Plan, sources: TritonSources, error: KernelTooLarge, context: Context) -> Plan:
    """The plan with smaller tiles for the kernels that the error names; the error, at the end."""
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


def _function(
    text: KernelText, known: dict[tuple[object, ...], TritonKernel], functions: list[str]
) -> TritonKernel:
    tile = text.tile
    constants = (("R", tile.rows), ("C", tile.columns))
    threads = (tile.num_warps, tile.num_stages)
    key = (text.parameters, text.body, text.called, text.promised, constants, threads)
    if key not in known:
        name = f"kernel{len(known)}"
        inner = ", ".join([*(p for p, _ in text.parameters), "R: tl.constexpr", "C: tl.constexpr"])
        language = "gluon" if text.is_gluon else "triton"
        own = f"\n\n@{language}.jit\ndef {name}({inner}):\n{text.body}"
        functions.append((text.called + own).replace("KERNEL", name))
        pointers = frozenset(p for p, kind in text.parameters if kind.startswith("*"))
        divisible = pointers | text.promised
        known[key] = TritonKernel(name, text.parameters, constants, divisible, *threads)
    return known[key]


def _texts_of(kernel: Kernel, plan: Plan, tile: Tile, dialect: Dialect) -> list[KernelText]:
    if kernel.batch is not None:
        return batch_texts(kernel, tile, dialect, plan.places)
    if kernel.contraction is not None:
        template = Template.of(plan.templates[kernel.name])
        return template_texts(kernel, plan.program.buffers, template, dialect)
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
