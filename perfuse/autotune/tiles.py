"""Tiles by measurement: a kernel's candidates raced on the GPU, the decision kept on disk.

The model's choice is the first candidate and stays unless another beats it by a margin. All
candidates compute the same loops, so only their speed is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from perfuse.autotune.compile_together import compile_in_time
from perfuse.autotune.device_kind import device_kind, generated_versions
from perfuse.autotune.program_request import known_sizes
from perfuse.autotune.race import Rules, Run, Timer, race, with_late
from perfuse.autotune.run_alone import are_sizes_shown, plan_of_one
from perfuse.autotune.stored import stored_or_measured
from perfuse.cache import keys
from perfuse.codegen.triton.tiling import candidates, widest_of
from perfuse.codegen.triton.unit import generate_triton, limits_of
from perfuse.context import Context
from perfuse.decision import Choice, Decision, Question, identified
from perfuse.ir import index as ix
from perfuse.ir.atoms import Indirect
from perfuse.ir.program import Matmul
from perfuse.schedule.plan import Kernel, Plan, with_tile
from perfuse.schedule.tile import Tile, TileKind

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
    for kernel in tuned_kernels(plan, context):
        alone = plan_of_one(kernel, plan)
        question = question_of(alone, context)
        if question not in known:
            known[question] = decide(question, alone, context, device)
        decisions[kernel.name] = replace(known[question], subject=subject_of(kernel))
    tiles = {name: tile_of(d.chosen) for name, d in decisions.items() if not d.is_open}
    return replace(plan, tiles=tiles, decisions=(*plan.decisions, *decisions.values()))


def is_sharing(context: Context) -> bool:
    """Whether decisions are shared with other machines in a mode that does not tune."""
    settings = context.settings
    is_measured = not settings.max_autotune and not settings.search_autotune_cache
    return settings.autotune_remote_cache and is_measured


def tuned_kernels(plan: Plan, context: Context) -> list[Kernel]:
    """The kernels whose tiles are tuned: the large ones; small ones are too short to matter.

    Where decisions are shared, it is at least the largest kernel of a program without matmuls.
    """
    measurable = [k for k in plan.kernels if is_measurable(k, plan)]
    least_bytes = context.settings.thresholds.tuned_tile_bytes
    large = [k for k in measurable if k.num_bytes >= least_bytes]
    if large or not measurable or not is_sharing(context) or _has_matmuls(plan):
        return large
    return [max(measurable, key=lambda kernel: kernel.num_bytes)]


def _has_matmuls(plan: Plan) -> bool:
    contracted = any(kernel.contraction is not None for kernel in plan.kernels)
    return contracted or any(isinstance(step, Matmul) for step in plan.steps)


def choice_of(tile: Tile) -> Choice:
    options = {**asdict(tile), "kind": str(tile.kind)}  # plain text, in keys too
    return Choice("tile", str(tile), tuple(options.items()))


def tile_of(choice: Choice) -> Tile:
    """The tile of a choice of this version."""
    options: dict[str, Any] = dict(choice.options)
    return Tile(**{**options, "kind": TileKind(options["kind"])})


def is_measurable(kernel: Kernel, plan: Plan) -> bool:
    """Sizes are given, and no index is read from data: random data would be out of bounds.

    Batches have one tile, contractions a template, and attention indexes by lists of blocks.
    """
    if not kernel.members or kernel.batch is not None or kernel.contraction is not None:
        return False
    if not are_sizes_shown(plan_of_one(kernel, plan)):
        return False
    indices = [r.index for m in kernel.members for r in m.loop.reads()]
    indices += [m.loop.index for m in kernel.members]
    return not any(isinstance(atom, Indirect) for at in indices for atom in ix.atoms_of(at))


def question_of(alone: Plan, context: Context) -> Question:
    """The question which tile of a kernel is fastest on this kind of GPU.

    The text of the default candidate stands for the kernel: it has no names of the program, and an
    edit of Perfuse that does not change it keeps the decision.
    """
    (kernel,) = alone.kernels
    widest = widest_of(kernel, alone.program.buffers)
    tiles = candidates(kernel, limits_of(context.target), widest)
    sources = generate_triton(with_tile(alone, tiles[0]), context)
    grids = [launch.grid for launches in sources.launches for launch in launches]
    layouts = [(b.dtype, b.shape, b.strides) for b in alone.program.buffers.values()]
    text = f"{sources.text}\n{sources.kernels!r}\n{grids!r}\n{layouts!r}{_likely(alone)}"
    loops = f"{len(kernel.members)} loops over {'x'.join(str(a.size) for a in kernel.axes)}"
    return Question(
        keys.TILE.name,
        identified(f"kernel of {loops}", text),
        tuple(map(choice_of, tiles)),
        device_kind(context.target),
        generated_versions(),
        f"{RULES}, within a second" if is_sharing(context) else str(RULES),
    )


def _likely(alone: Plan) -> str:
    """The sizes that a dynamic kernel is measured at; nothing where all are known."""
    buffers, program = alone.program.buffers.values(), alone.program
    shapes = [known_sizes(buffer.shape, program) for buffer in buffers]
    is_static = all(shape == b.shape for shape, b in zip(shapes, buffers, strict=True))
    return "" if is_static else f"\n{shapes!r}"


def subject_of(kernel: Kernel) -> str:
    return f"kernel {kernel.name}"


def decide(question: Question, alone: Plan, context: Context, device: Device | None) -> Decision:
    """The remembered decision for a kernel on this kind of GPU, or a new one."""
    tiles = [tile_of(choice) for choice in question.candidates]

    def measure() -> Decision:
        assert device is not None
        late = _build_together(alone, tiles, device.build, context)
        raced = [tile for tile in tiles if tile not in late]
        decision = race_tiles(alone, raced, device.load(alone), device.timer, context.tune_until)
        return with_late(decision, question.candidates)

    subject, counter = subject_of(alone.kernels[0]), "autotune.kernels_measured"
    return stored_or_measured(
        question, subject, context, None if device is None else measure, counter
    )


def _build_together(alone: Plan, tiles: list[Tile], build: Build, context: Context) -> set[Tile]:
    """Compile all candidates at once; those for which there was no time.

    What fails otherwise will fail again where it is measured.
    """
    builds = [(tile, partial(build, alone, tile)) for tile in tiles]
    return set(compile_in_time(builds, context))


def race_tiles(
    alone: Plan,
    tiles: list[Tile],
    load: Callable[[Tile], Run],
    timer: Timer,
    deadline: float = math.inf,
) -> Decision:
    """Race the tiles of a plan of one kernel, the model's choice first."""
    choices = [choice_of(tile) for tile in tiles]
    subject = subject_of(alone.kernels[0])
    return race(
        subject,
        choices,
        lambda choice: load(tile_of(choice)),
        RULES,
        timer=timer,
        deadline=deadline,
    )
