"""`retiled`: a plan whose kernels fit the GPU, after one exceeded the limits of a block."""

from __future__ import annotations

from dataclasses import replace

from perfuse.codegen.triton.sources import TritonSources
from perfuse.codegen.triton.tiling import smaller
from perfuse.codegen.triton.unit import tile_of
from perfuse.context import Context
from perfuse.errors import KernelTooLarge
from perfuse.schedule.plan import Plan


def retiled(plan: Plan, sources: TritonSources, error: KernelTooLarge, context: Context) -> Plan:
    """The plan with smaller tiles for the kernels that the error names; the error, at the end."""
    tiles = dict(plan.tiles)
    for kernel, launches in zip(plan.kernels, sources.launches, strict=True):
        if any(launch.kernel in error.kernels for launch in launches):
            is_fixed = kernel.contraction is not None  # its template was chosen as it is
            less = None if is_fixed else smaller(tile_of(kernel, plan, context))
            if less is None:
                raise error
            tiles[kernel.name] = less
    return replace(plan, tiles=tiles)
