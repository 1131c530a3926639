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
from perfuse.autotune.machine import device_kind, generated_versions
from perfuse.autotune.race import Rules, Run, Timer, race
from perfuse.autotune.stored import stored_or_measured
from perfuse.cache import keys
from perfuse.codegen.triton.tiling import candidates, widest_of
from perfuse.codegen.triton.unit import generate_triton, machine_of
from perfuse.context import Context
from perfuse.decision import Choice, Decision, Question, identified
from perfuse.ir import index as ix
from perfuse.ir.atoms import Indirect
from perfuse.ir.program import BufferKind, Program, View
from perfuse.schedule.plan import Kernel, Plan, static_product, with_tile
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


def measured_tiles(plan: Plan, context: Context, device: Device | None) -> Plan:
    """The plan with the fastest tile of each kernel that is worth measuring.

    Without a device, the tiles are those that are remembered.
    """
    decisions: dict[str, Decision] = {}
    known: dict[Question, Decision] = {}
    least_bytes = context.settings.thresholds.tuned_tile_bytes  # smaller ones end before it matters
    for kernel in plan.kernels:
        if kernel.num_bytes >= least_bytes and is_measurable(kernel, plan.program):
            alone = plan_of_one(kernel, plan.program)
            question = question_of(alone, context)
            if question not in known:
                known[question] = decide(question, alone, context, device)
            decisions[kernel.name] = replace(known[question], subject=subject_of(kernel))
    tiles = {name: tile_of(d.chosen) for name, d in decisions.items() if not d.is_open}
    return replace(plan, tiles=tiles, decisions=(*plan.decisions, *decisions.values()))


def choice_of(tile: Tile) -> Choice:
    return Choice("tile", str(tile), tuple(asdict(tile).items()))


def tile_of(choice: Choice) -> Tile:
    """The tile of a choice; TypeError where its options are those of another version."""
    options: dict[str, Any] = dict(choice.options)
    return Tile(**options)


def is_measurable(kernel: Kernel, program: Program) -> bool:
    """Sizes are known, and no index is read from data: random data would be out of bounds.

    Batches have one tile, contractions a template.
    """
    if kernel.batch is not None or kernel.contraction is not None:
        return False
    names = {*kernel.reads(), *kernel.stored}
    sizes = [a.size for a in kernel.axes] + [program.buffers[n].num_elements for n in names]
    if static_product(sizes) is None:
        return False
    indices = [r.index for m in kernel.members for r in m.loop.reads()]
    indices += [m.loop.index for m in kernel.members]
    return not any(isinstance(atom, Indirect) for at in indices for atom in ix.atoms_of(at))


def question_of(alone: Plan, context: Context) -> Question:
    """The question which tile of a kernel is fastest on this kind of GPU.

    The text of the default candidate stands for the kernel: it has no names of the program, and
    an edit of Perfuse that leaves it as it is keeps the decision.
    """
    (kernel,) = alone.kernels
    widest = widest_of(kernel, alone.program.buffers)
    tiles = candidates(kernel, machine_of(context.target), widest)
    sources = generate_triton(with_tile(alone, tiles[0]), context)
    grids = [launch.grid for launches in sources.launches for launch in launches]
    layouts = [(b.dtype, b.shape, b.strides) for b in alone.program.buffers.values()]
    text = f"{sources.text}\n{sources.kernels!r}\n{grids!r}\n{layouts!r}"
    loops = f"{len(kernel.members)} loops over {'x'.join(str(a.size) for a in kernel.axes)}"
    return Question(
        keys.TILE.name,
        identified(f"kernel of {loops}", text),
        tuple(map(choice_of, tiles)),
        device_kind(context.target),
        generated_versions(),
        str(RULES),
    )


def subject_of(kernel: Kernel) -> str:
    return f"kernel {kernel.name}"


def decide(question: Question, alone: Plan, context: Context, device: Device | None) -> Decision:
    """The remembered decision for a kernel on this kind of GPU, or a new one."""
    tiles = [tile_of(choice) for choice in question.candidates]

    def measure() -> Decision:
        assert device is not None
        _build_together(alone, tiles, device.build, context)
        return race_tiles(alone, tiles, device.load(alone), device.timer)

    subject, counter = subject_of(alone.kernels[0]), "autotune.kernels_measured"
    return stored_or_measured(
        question, subject, context, None if device is None else measure, counter
    )


def _build_together(alone: Plan, tiles: list[Tile], build: Build, context: Context) -> None:
    """Compile all candidates at once; what fails will fail again where it is measured."""
    builds = [(tile, partial(build, alone, tile)) for tile in tiles]
    compile_together(builds, num_compile_threads(context, len(tiles)), context.counters)


def race_tiles(
    alone: Plan, tiles: list[Tile], load: Callable[[Tile], Run], timer: Timer
) -> Decision:
    """Race the tiles of a plan of one kernel, the model's choice first."""
    choices = [choice_of(tile) for tile in tiles]
    subject = subject_of(alone.kernels[0])
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
