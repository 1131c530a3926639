"""The time of each tile of a kernel, and whether another should be the model's choice.

python -m benchmarks.gpu_tiles --only '^(sum_rows|amax_all)$'
python -m benchmarks.gpu_tiles --build  # anywhere: compiled for an H100, not run

Candidates of a kernel take turns, L2 flushed before each, and so do eager and the peer where the
case is one kernel. Beside tuning's own candidates there are the wider ones of `benchmarks.tiles`,
and where it makes a difference the model's choice with `gpu.approximate`.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cases import Case
from benchmarks.contest import step_of
from benchmarks.gpu_cases import Row, f32, gpu_cases
from benchmarks.gpu_worker import Stopwatch
from benchmarks.memory_cases import gelu_bias, swish
from benchmarks.tiles import wider
from perfuse import config
from perfuse.autotune.program_request import random_inputs
from perfuse.autotune.race import Reading, Rules, race
from perfuse.autotune.run_alone import plan_of_one
from perfuse.backends import backend_of
from perfuse.build.bundle import read_bundle
from perfuse.cache.manifest import Entry
from perfuse.codegen.triton.sources import TritonSources
from perfuse.codegen.triton.tiling import candidates, widest_of
from perfuse.codegen.triton.unit import generate_triton, limits_of
from perfuse.context import Context
from perfuse.counters import counters
from perfuse.decision import Choice
from perfuse.schedule.plan import Kernel, Plan, with_tile
from perfuse.schedule.tile import Tile
from perfuse.target import target_of
from tests.unit.planning import plans_of

SMALLEST_BYTES = 32 << 20
WORTHWHILE = 0.98  # of the model's choice: below it, another should be chosen
RULES = Rules(margin=WORTHWHILE, budget_s=0.7, fewest_rounds=5, most_rounds=200)

# Beside the benchmark's: what is computed of floats, as eager would and by approximation.
WIDE = f32(8192, 4096)
FLOATS = (
    Row("gelu_bias_f32_fb", gelu_bias, (f32(4096), WIDE), fb=True),
    Row("swish_f32_fb", swish, (WIDE,), fb=True),
    Row("softmax_f32", lambda x: torch.softmax(x, -1), (WIDE,)),
    Row("logsumexp_f32", lambda x: torch.logsumexp(x, -1), (f32(8192, 8192),)),
)
APPROXIMATE, RIVALS = "approximate", ("inductor", "eager")

Step = Callable[[], Any]


Built = tuple[TritonSources, tuple[Entry, ...]]


@dataclass(frozen=True, slots=True)
class Way:
    """A tile, and the settings under which its kernel is written."""

    name: str
    tile: Tile
    context: Context


@dataclass(frozen=True, slots=True)
class Entrant:
    """One way to run the kernel: a tile, or another program."""

    name: str
    step: Step | None  # None where it did not compile or run
    said: str  # registers and memory, or why it is out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="regular expression on the names of cases")
    parser.add_argument("--build", action="store_true", help="compile for an H100, run nothing")
    parser.add_argument("--shrink", type=int, default=1, help="with --build: divides the sizes")
    arguments = parser.parse_args()
    console, context = Console(width=140), _context(is_here=not arguments.build)
    verdicts = []
    for case in _cases(arguments.shrink):
        if re.search(arguments.only, case.name):
            began = time.perf_counter()
            for table, verdict in _races(case, context, runs=not arguments.build):
                console.print(table)
                verdicts.append(verdict)
            console.print(f"{case.name}: {time.perf_counter() - began:.1f} s", highlight=False)
    for verdict in verdicts:
        console.print(verdict, highlight=False)


def _context(*, is_here: bool) -> Context:
    settings = config.snapshot()
    if is_here:
        return Context.on(torch.device("cuda", torch.cuda.current_device()), settings)
    return Context(target_of("cuda:90", settings), settings, counters)


def _cases(shrink: int) -> list[Case]:
    kernels = [case for case in gpu_cases(shrink).values() if case.kind == "kernel"]
    return kernels + [row.case(shrink) for row in FLOATS]


def _races(case: Case, context: Context, *, runs: bool) -> Iterator[tuple[Table, str]]:
    """A table and a verdict for each large kernel that reduces, or could approximate."""
    with torch.device(context.device):
        problem = case.build()
    with torch.set_grad_enabled(problem.has_backward):
        plans = plans_of(problem.function, *problem.args, context=context)
    kernels = [(k, plan) for plan in plans for k in plan.kernels]
    is_alone, device = len(kernels) == 1, context.device.type
    for number, (kernel, plan) in enumerate(kernels):
        alone = plan_of_one(kernel, plan)
        is_small = runs and kernel.num_bytes < SMALLEST_BYTES
        if is_small or not (_reduces(kernel) or _approximates(alone, context)):
            continue
        entrants = _entrants(kernel, alone, context, runs=runs)
        if runs and is_alone:
            entrants += [Entrant(rival, step_of(problem, rival), "") for rival in RIVALS]
        name, times = f"{case.name} kernel {number}", _times(entrants, device) if runs else {}
        yield _table(name, entrants, times), _verdict(name, entrants, times)


def _reduces(kernel: Kernel) -> bool:
    return any(m.role in ("inner", "outer", "all") for m in kernel.members)


def _approximating(context: Context) -> Context:
    settings = context.settings
    return replace(context, settings=replace(settings, gpu=replace(settings.gpu, approximate=True)))


def _approximates(alone: Plan, context: Context) -> bool:
    """Whether the kernel has another text where it may approximate."""
    texts = {generate_triton(alone, c).text for c in (context, _approximating(context))}
    return len(texts) > 1


def _entrants(kernel: Kernel, alone: Plan, context: Context, *, runs: bool) -> list[Entrant]:
    """Every candidate, the model's choice first, compiled together."""
    limits, widest = limits_of(context.target), widest_of(kernel, alone.program.buffers)
    tiles = candidates(kernel, limits, widest)
    tiles = list(dict.fromkeys([*tiles, *wider(kernel, tiles[0], limits, widest)]))
    ways = [Way(str(tile), tile, context) for tile in tiles]
    if _approximates(alone, context):
        ways.append(Way(f"{tiles[0]}, {APPROXIMATE}", tiles[0], _approximating(context)))
    with ThreadPoolExecutor(context.num_jobs(len(ways))) as pool:
        built = list(pool.map(lambda way: _built(alone, way.tile, way.context), ways))
    inputs = list(random_inputs(alone.program, context.device).values()) if runs else []
    return [
        _entrant(alone, way, made, inputs, runs=runs) for way, made in zip(ways, built, strict=True)
    ]


def _built(alone: Plan, tile: Tile, context: Context) -> Built | str:
    try:
        backend = backend_of(context.target)
        sources = backend.generate(with_tile(alone, tile), context)
        return sources, backend.build(sources, context)
    except Exception as error:  # a candidate that does not compile is a row, not the end
        return f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"


def _entrant(
    alone: Plan, way: Way, built: Built | str, inputs: list[Any], *, runs: bool
) -> Entrant:
    if isinstance(built, str):
        return Entrant(way.name, None, built)
    sources, entries = built
    if not runs:
        return Entrant(way.name, None, _usage(entries[0]))
    backend = backend_of(way.context.target)
    host = backend.host(alone, sources, way.context)
    call = backend.load(host, entries, {}, way.context)
    try:
        call(list(inputs))
    except Exception as error:  # nor is one that does not run
        return Entrant(way.name, None, f"{type(error).__name__}: {error}"[:60])
    return Entrant(way.name, lambda: call(list(inputs)), _usage(entries[0]))


def _usage(entry: Entry) -> str:
    """Registers and memory of the first kernel of a bundle."""
    objects = read_bundle(entry.read_bytes).objects
    if not objects:
        return "interpreted"
    made = objects[0]
    spilt = f", {made.stack_bytes} B stack" if made.stack_bytes else ""
    return f"{made.num_registers} registers, {made.shared_bytes >> 10} KiB{spilt}"


def _times(entrants: list[Entrant], device: str) -> dict[str, float]:
    """Microseconds of each, the medians of rounds in which all take their turn."""
    steps = {e.name: e.step for e in entrants if e.step is not None}
    for step in steps.values():  # compiled before anybody looks at a clock
        step()
    clock, names = Stopwatch(device, steps, is_ahead=True), {s: n for n, s in steps.items()}

    def timed(step: Step) -> Reading:
        milliseconds = clock(names[step], step)
        return lambda: milliseconds() / 1e3

    choices = [Choice("tile", name) for name in steps]
    decision = race("tiles", choices, lambda choice: steps[choice.name], RULES, timer=timed)
    return {r.choice.name: r.median_us for r in decision.rivals if r.median_us is not None}


def _table(title: str, entrants: list[Entrant], times: dict[str, float]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("candidate", "us", "of the model's", "registers, shared memory"):
        table.add_column(heading, justify="left" if heading == "candidate" else "right")
    ours = times.get(entrants[0].name, float("nan"))
    for entrant in sorted(entrants, key=lambda e: times.get(e.name, float("inf"))):
        time_us = times.get(entrant.name)
        shown = ("-", "-") if time_us is None else (f"{time_us:.1f}", f"{time_us / ours:.3f}")
        name = f"{entrant.name}  <- the model's" if entrant is entrants[0] else entrant.name
        table.add_row(name, *shown, entrant.said)
    return table


def _verdict(title: str, entrants: list[Entrant], times: dict[str, float]) -> str:
    ours = entrants[0].name
    if ours not in times:
        return (
            f"{title}: {sum(' registers' in e.said for e in entrants)} of {len(entrants)} compiled"
        )
    others = [name for name in times if name in RIVALS or name.endswith(APPROXIMATE)]
    best = min((name for name in times if name not in others), key=times.__getitem__)
    told = "".join(f", {name.split(', ')[-1]} {times[name]:.1f}" for name in others)
    is_better = times[best] < WORTHWHILE * times[ours]
    advice = f"CHANGE to {best} ({times[best]:.1f})" if is_better else f"keep (best {best})"
    return f"{title}: {ours} {times[ours]:.1f}{told}: {advice}"


if __name__ == "__main__":
    main()
