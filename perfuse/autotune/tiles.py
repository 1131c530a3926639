"""Tiles by measurement: a kernel's candidates raced on the GPU, the decision kept on disk.

The model's choice is the first candidate and stays unless another beats it by a margin. All
candidates compute the same loops, so only their speed is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from perfuse.autotune.compile_together import compile_together, num_compile_threads
from perfuse.autotune.race import Rules, Run, Timer, race
from perfuse.autotune.stored import stored_or_measured
from perfuse.cache import keys
from perfuse.cache.keys import identity, key_of
from perfuse.codegen.triton.tiling import candidates, widest_of
from perfuse.codegen.triton.unit import machine_of
from perfuse.context import Context
from perfuse.decision import Choice, Decision
from perfuse.ir import index as ix
from perfuse.ir.atoms import Indirect
from perfuse.ir.program import BufferKind, Program, View
from perfuse.schedule.plan import Kernel, Plan, static_product
from perfuse.schedule.tile import Tile

# Readings are the GPU's own, with caches flushed before each turn: rounds are long enough for few.
RULES = Rules(margin=0.97, fewest_rounds=15, most_rounds=15)

# What runs a plan of one kernel, cut by a tile; asked once for a plan, then for every tile.
Load = Callable[[Plan], Callable[[Tile], Run]]
# Compiles the same, so that loading finds it done.
Build = Callable[[Plan, Tile], object]


@dataclass(frozen=True, slots=True)
class Device:
    """The functions of later rooms that measuring needs."""

    build: Build
    load: Load
    timer: Timer


def measured_tiles(plan: Plan, context: Context, device: Device) -> Plan:
    """The plan with the fastest tile of each kernel that is worth measuring."""
    decisions: dict[str, Decision] = {}
    least_bytes = context.settings.thresholds.tuned_tile_bytes  # smaller ones end before it matters
    for kernel in plan.kernels:
        if kernel.num_bytes >= least_bytes and is_measurable(kernel, plan.program):
            decisions[kernel.name] = decide(kernel, plan.program, context, device)
    tiles = {name: tile_of(decision.chosen) for name, decision in decisions.items()}
    return replace(plan, tiles=tiles, decisions=(*plan.decisions, *decisions.values()))


def choice_of(tile: Tile) -> Choice:
    return Choice("tile", str(tile), tuple(asdict(tile).items()))


def tile_of(choice: Choice) -> Tile:
    """The tile of a choice; TypeError where its options are those of another version."""
    options: dict[str, Any] = dict(choice.options)
    return Tile(**options)


def is_measurable(kernel: Kernel, program: Program) -> bool:
    """Sizes are known, and no index is read from data: random data would be out of bounds.

    Batches have one tile.
    """
    if kernel.batch is not None:
        return False
    names = {*kernel.reads(), *kernel.stored}
    sizes = [a.size for a in kernel.axes] + [program.buffers[n].num_elements for n in names]
    if static_product(sizes) is None:
        return False
    indices = [r.index for m in kernel.members for r in m.loop.reads()]
    indices += [m.loop.index for m in kernel.members]
    return not any(isinstance(atom, Indirect) for at in indices for atom in ix.atoms_of(at))


def decide(kernel: Kernel, program: Program, context: Context, device: Device) -> Decision:
    """The stored decision for a kernel on this GPU, or a new one."""
    alone = plan_of_one(kernel, program)
    shapes = [str(b) for b in alone.program.buffers.values()]
    key = key_of(keys.TILE, *identity(context), str(alone), shapes, RULES)

    def measure() -> Decision:
        widest = widest_of(kernel, program.buffers)
        tiles = candidates(kernel, machine_of(context.target), widest)
        _build_together(alone, tiles, device.build, context)
        return race_tiles(alone, tiles, device.load(alone), device.timer)

    return stored_or_measured(key, context, tile_of, measure, "autotune.kernels_measured")


def _build_together(alone: Plan, tiles: list[Tile], build: Build, context: Context) -> None:
    """Compile all candidates at once; what fails will fail again where it is measured."""
    builds = [(tile, partial(build, alone, tile)) for tile in tiles]
    compile_together(builds, num_compile_threads(context, len(tiles)), context.counters)


def race_tiles(
    alone: Plan, tiles: list[Tile], load: Callable[[Tile], Run], timer: Timer
) -> Decision:
    """Race the tiles of a plan of one kernel, the model's choice first."""
    choices = [choice_of(tile) for tile in tiles]
    subject = f"kernel {alone.kernels[0].name}"
    return race(subject, choices, lambda choice: load(tile_of(choice)), RULES, timer=timer)


def plan_of_one(kernel: Kernel, program: Program) -> Plan:
    """A plan of the kernel alone: what it reads is given, what it stores is returned."""
    made = [m.loop.out for m in kernel.members]
    names = dict.fromkeys([*kernel.reads(), *made])
    own = {n for n in made if program.buffers[n].kind != BufferKind.INPUT}
    buffers = {
        n: replace(program.buffers[n], kind=BufferKind.TEMP if n in own else BufferKind.INPUT)
        for n in names
    }
    outputs = tuple(
        View(n, buffers[n].shape, buffers[n].strides, 0) for n in sorted(own & kernel.stored)
    )
    given = tuple(n for n in buffers if n not in own)
    alone = Program(given, buffers, tuple(m.loop for m in kernel.members), outputs)
    return Plan(alone, (kernel,), (), {}, 0)
