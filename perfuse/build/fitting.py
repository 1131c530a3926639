"""Kernels that fit the GPU: where one asks for more than a block has, it is cut smaller."""

from __future__ import annotations

from collections.abc import Mapping

from perfuse.build.manifest import Entry
from perfuse.build.triton import build_bundle
from perfuse.codegen.triton.sources import TritonSources
from perfuse.codegen.triton.tiling import Tile, smaller
from perfuse.codegen.triton.unit import generate_triton, tile_of
from perfuse.context import Context
from perfuse.errors import KernelTooLarge
from perfuse.schedule.plan import Plan


def build_fitting(
    plan: Plan, sources: TritonSources, tiles: Mapping[str, Tile], context: Context
) -> tuple[TritonSources, Entry]:
    """The bundle of a plan, and the sources it was made of: those given, where they fit."""
    while True:
        try:
            return sources, build_bundle(sources, context)
        except KernelTooLarge as error:
            tiles = _smaller_tiles(plan, sources, tiles, context, error)
            context.counters.inc("build.tiles_made_smaller", len(error.kernels))
            sources = generate_triton(plan, context, tiles)


def _smaller_tiles(
    plan: Plan,
    sources: TritonSources,
    tiles: Mapping[str, Tile],
    context: Context,
    error: KernelTooLarge,
) -> dict[str, Tile]:
    """The tiles, with smaller ones for the kernels that the error names."""
    found = dict(tiles)
    for kernel, launches in zip(plan.kernels, sources.launches, strict=True):
        if any(launch.kernel in error.kernels for launch in launches):
            less = smaller(tiles.get(kernel.name) or tile_of(kernel, plan, context))
            if less is None:
                raise error
            found[kernel.name] = less
    return found
