"""Tiles by measurement: a kernel's candidates raced on the GPU, the decision kept on disk.

The model's choice is the first candidate and stays unless another beats it by a margin. All
candidates compute the same loops, so there is nothing to prove but their speed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from perfuse.cache import keys
from perfuse.cache.access import open_store
from perfuse.cache.keys import identity, key_of
from perfuse.cache.store import Store
from perfuse.codegen.triton.tiling import candidates, widest_of
from perfuse.codegen.triton.unit import machine_of
from perfuse.context import Context
from perfuse.errors import MALFORMED, CacheDamaged, KernelTooLarge
from perfuse.ir import index as ix
from perfuse.ir.program import Program, View
from perfuse.logs import channel
from perfuse.schedule.plan import Kernel, Plan, static_product
from perfuse.schedule.tile import Tile

_MARGIN = 0.97
_FILE = "tile.json"

# Seconds of one run of a plan of one kernel, cut by a tile.
Measure = Callable[[Plan, Tile], float]
# Compiles the same, so that measuring finds it done.
Build = Callable[[Plan, Tile], object]


@dataclass(frozen=True, slots=True)
class TileDecision:
    """What was chosen, and the microseconds of every candidate, the model's first."""

    tile: dict[str, Any]
    microseconds: list[tuple[str, float]]
    failed: list[tuple[str, str]]  # candidates that did not run, and why


def choose_tiles(plan: Plan, context: Context, measure: Measure, build: Build) -> dict[str, Tile]:
    """The fastest tile of each kernel that is worth measuring."""
    chosen: dict[str, Tile] = {}
    least_bytes = context.settings.thresholds.tuned_tile_bytes  # smaller ones end before it matters
    for kernel in plan.kernels:
        if kernel.num_bytes >= least_bytes and _is_measurable(kernel, plan.program):
            decision = decide(kernel, plan.program, context, measure, build)
            chosen[kernel.name] = Tile(**decision.tile)
    return chosen


def _is_measurable(kernel: Kernel, program: Program) -> bool:
    """Sizes are known, and no position is read from data: made-up data would lead outside.

    Batches have one tile.
    """
    if kernel.batch is not None:
        return False
    names = {*kernel.reads(), *kernel.stored}
    sizes = [a.size for a in kernel.axes] + [program.buffers[n].num_elements for n in names]
    if static_product(sizes) is None:
        return False
    indices = [r.attr[1] for m in kernel.members for r in m.loop.reads()]
    indices += [m.loop.index for m in kernel.members]
    return not any(atom.kind == "value" for at in indices for atom in ix.atoms_of(at))


def decide(
    kernel: Kernel, program: Program, context: Context, measure: Measure, build: Build
) -> TileDecision:
    """The stored decision for a kernel on this GPU, or a new one."""
    store = open_store(context)
    alone = plan_of_one(kernel, program)
    key = _key(alone, context)
    found = _stored(store, key) if context.settings.cache.enabled else None
    if found is not None:
        context.counters.inc("autotune.cache_hit")
        return found
    widest = widest_of(kernel, program.buffers)
    tiles = candidates(kernel, machine_of(context.target), widest)
    _build_together(alone, tiles, build, context.num_jobs(len(tiles)))
    decision = race(alone, tiles, measure)
    context.counters.inc("autotune.kernels_measured")
    channel("tuning").info(
        "%s: %s; microseconds %s", kernel.name, decision.tile, decision.microseconds
    )
    store.put(key, {_FILE: json.dumps(asdict(decision), indent=1).encode()})
    return decision


def _stored(store: Store, key: str) -> TileDecision | None:
    entry = store.get(key)
    if entry is None:
        return None
    try:
        found = entry.read_json(_FILE)
        rows = [[tuple(row) for row in found[name]] for name in ("microseconds", "failed")]
        return TileDecision(asdict(Tile(**found["tile"])), *rows)
    except (CacheDamaged, *MALFORMED):
        store.discard(key)
        return None


def _build_together(alone: Plan, tiles: list[Tile], build: Build, num_jobs: int) -> None:
    """Compile all candidates at once; what fails will fail again where it is measured."""
    with ThreadPoolExecutor(num_jobs) as pool:
        for made in [pool.submit(build, alone, tile) for tile in tiles]:
            with contextlib.suppress(Exception):
                made.result()


def race(alone: Plan, tiles: list[Tile], measure: Measure) -> TileDecision:
    """Measure every candidate; one that does not compile or run is out, its reason kept."""
    times: list[tuple[Tile, float]] = []
    failed: list[tuple[str, str]] = []
    for tile in tiles:
        try:
            times.append((tile, measure(alone, tile)))
        except Exception as error:
            failed.append((str(tile), f"{type(error).__name__}: {error}"))
            is_ours = tile == tiles[0] and not isinstance(error, KernelTooLarge)
            if is_ours or len(failed) == len(tiles):
                raise  # the model's own choice has to compile and run, if it fits
    best = min(times, key=lambda row: row[1])
    if best[1] > _MARGIN * times[0][1]:
        best = times[0]
    rows = [(str(t), round(1e6 * s, 2)) for t, s in times]
    return TileDecision(asdict(best[0]), rows, failed)


def plan_of_one(kernel: Kernel, program: Program) -> Plan:
    """A plan of the kernel alone: what it reads is given, what it stores is returned."""
    made = [m.loop.out for m in kernel.members]
    names = dict.fromkeys([*kernel.reads(), *made])
    own = {n for n in made if program.buffers[n].role != "input"}
    buffers = {n: replace(program.buffers[n], role="temp" if n in own else "input") for n in names}
    outputs = tuple(
        View(n, buffers[n].shape, buffers[n].strides, 0) for n in sorted(own & kernel.stored)
    )
    given = tuple(n for n in buffers if n not in own)
    alone = Program(given, buffers, tuple(m.loop for m in kernel.members), outputs)
    return Plan(alone, (kernel,), (), {}, 0)


def _key(alone: Plan, context: Context) -> str:
    shapes = [str(b) for b in alone.program.buffers.values()]
    return key_of(keys.TILE, *identity(context), str(alone), shapes, _MARGIN)
