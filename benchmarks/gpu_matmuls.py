"""Matmuls on a GPU: every candidate template against the library, checked and timed.

python -m benchmarks.gpu_matmuls --out matmuls.json              # all problems, about five minutes
python -m benchmarks.gpu_matmuls --only 'gelu|4096' --peer       # with TorchInductor's max-autotune
python -m benchmarks.gpu_matmuls --build                         # anywhere: compiled, not run
python -m benchmarks.gpu_matmuls --most 40 --templates ping-pong # more than tuning would try

All candidates of all problems are compiled first, in threads. The entries of a problem take turns
in rounds, each round starting with another one, L2 flushed before each turn; medians count. A
candidate that fails is a row with its reason.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.matmul_cases import CASES, Case
from perfuse.autotune.program_request import random_inputs
from perfuse.autotune.race_plans import PlanRace
from perfuse.autotune.sites import plan_of_site, sites_of, with_choice
from perfuse.autotune.templates import gate_of
from perfuse.backends import backend_of
from perfuse.build.bundle import CodeObject, read_bundle
from perfuse.candidates.site import Site
from perfuse.candidates.triton import template_choices
from perfuse.codegen.triton.templates.propose import MOST
from perfuse.context import Context
from perfuse.decision import Choice
from perfuse.runtime.measure import event_timer
from perfuse.schedule.plan import Plan
from perfuse.schedule.schedule import place
from perfuse.target import device_target, target_of
from tests.unit.planning import plans_of

Run = Callable[[], Any]


@dataclass
class Row:
    """One entry of a problem: how it was built, whether it is right, and its time."""

    problem: str
    entry: str
    registers: int = 0
    spilled: int = 0
    shared_bytes: int = 0
    build_s: float = 0.0
    failure: str = ""
    times_us: list[float] = field(default_factory=list)

    @property
    def median_us(self) -> float | None:
        return statistics.median(self.times_us) if self.times_us else None


@dataclass
class Job:
    """A problem being measured: its plan of one, and the choices to compute it."""

    case: Case
    site: Site
    alone: Plan
    choices: list[Choice]
    rows: dict[str, Row]


def context_of(target: str | None) -> Context:
    """The context of the GPU here, or of one by its name."""
    context = Context.default()
    if target is not None:
        return replace(context, target=target_of(target, context.settings))
    device = torch.device("cuda", 0)
    return replace(context, target=device_target(context.settings, device), device=device)


def job_of(case: Case, context: Context, most: int = MOST, templates: str = "") -> Job:
    # Tensors without memory: tracing runs the function, here even on a CPU.
    with torch.no_grad(), FakeTensorMode():
        (plan, *_) = plans_of(case.fn, *case.inputs(context.device.type), context=context)
    site = max(sites_of(plan), key=lambda s: len(s.matmuls) * (1 + (s.fused is not None)))
    gpu = context.target.gpu
    assert gpu is not None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    others = template_choices(site, plan.program, gpu, tf32, most)
    choices = [site.default, *(c for c in others if re.search(templates, c.name))]
    rows = {c.name: Row(case.name, c.name) for c in choices}
    return Job(case, site, plan_of_site(site, plan), choices, rows)


def build(job: Job, choice: Choice, context: Context) -> None:
    """Compile a candidate, and note what it needs."""
    row, start = job.rows[choice.name], time.perf_counter()
    backend = backend_of(context.target)
    try:
        plan = place(with_choice(job.alone, job.site, choice), context)
        bundle, *_ = backend.build(backend.generate(plan, context), context)
        objects: Sequence[CodeObject] = read_bundle(bundle.read_bytes).objects
        if objects:
            row.registers = max(made.num_registers for made in objects)
            row.spilled = max(made.stack_bytes for made in objects)
            row.shared_bytes = max(made.shared_bytes for made in objects)
    except Exception as error:
        row.failure = f"build: {_first_line(error)}"
    row.build_s = round(time.perf_counter() - start, 2)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[
        :160
    ]


def measure(job: Job, context: Context, seconds: float, others: dict[str, Run]) -> None:
    """Check each entry against a reference, then time all of them in rounds."""
    inputs = random_inputs(job.alone.program, context.device)
    gate = gate_of(job.site, job.alone, inputs, context)
    plan_of = partial(with_choice, job.alone, job.site)
    rivals = PlanRace(job.case.name, job.case.name, tuple(job.choices), plan_of, inputs)
    runs: dict[str, Run] = {}
    expected: Any = None
    for choice in job.choices:
        row = job.rows[choice.name]
        if row.failure:
            continue
        print(f"{job.case.name}: {choice.name}", flush=True)  # the last line names one that hangs
        try:
            run = rivals.run(choice, context)
            result = run()
            torch.cuda.synchronize()
            expected = result if expected is None else expected
            row.failure = gate(expected, result) or ""
        except Exception as error:
            row.failure = f"run: {_first_line(error)}"
        if not row.failure:
            runs[choice.name] = run
    for name, run in others.items():
        job.rows[name] = Row(job.case.name, name)
        try:
            run()
            runs[name] = run
        except Exception as error:
            job.rows[name].failure = f"run: {_first_line(error)}"
    _rounds(job, runs, context, seconds)


def _rounds(job: Job, runs: dict[str, Run], context: Context, seconds: float) -> None:
    timer, start, names = event_timer(context.device), time.perf_counter(), list(runs)
    readings: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
    for number in range(30):
        shift = number % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            readings[name].append(timer(runs[name]))
        torch.cuda.synchronize()
        if number >= 6 and time.perf_counter() - start > seconds:
            break
    for name, found in readings.items():
        job.rows[name].times_us = [round(1e6 * reading(), 2) for reading in found]


def peer_run(case: Case) -> Run:
    """TorchInductor's max-autotune of the same function."""
    torch._dynamo.reset()
    compiled = torch.compile(case.fn, mode="max-autotune-no-cudagraphs", dynamic=False)
    inputs = case.inputs("cuda")
    with torch.no_grad():
        compiled(*inputs)
    return lambda: compiled(*inputs)


def other_runs(case: Case, with_peer: bool) -> dict[str, Run]:
    """Eager, the library's own fused call, and the peer."""
    inputs: tuple[Tensor, ...] = case.inputs("cuda")
    runs: dict[str, Run] = {"eager": lambda: case.fn(*inputs)}
    if case.library is not None:
        call = case.library
        runs["library, fused"] = lambda: call(*inputs)
    if with_peer:
        try:
            runs["inductor max-autotune"] = peer_run(case)
        except Exception:
            traceback.print_exc()
    return runs


def show(jobs: Sequence[Job], console: Console, *, is_whole: bool) -> None:
    """A line for each problem, or for each of its entries."""
    table = Table("problem", "entry", "us", "x of best other", "regs", "spill", "shared", "note")
    for job in jobs:
        rows = sorted(job.rows.values(), key=lambda row: row.median_us or float("inf"))
        others = [r.median_us for r in rows if not _is_template(r, job) and r.median_us]
        best = min(others, default=None)
        shown = rows if is_whole else [*_best(rows, job), *(r for r in rows if r.failure)]
        for row in shown:
            ratio = f"{best / row.median_us:.3f}" if best and row.median_us else ""
            time_us = f"{row.median_us:,.1f}" if row.median_us else "-"
            facts = [str(n) if n else "" for n in (row.registers, row.spilled, row.shared_bytes)]
            table.add_row(job.case.name, row.entry, time_us, ratio, *facts, row.failure[:70])
        table.add_section()
    console.print(table)


def _is_template(row: Row, job: Job) -> bool:
    return any(choice.name == row.entry and choice.source == "triton" for choice in job.choices)


def _best(rows: Sequence[Row], job: Job) -> list[Row]:
    """The fastest template and all that are not templates."""
    templates = [row for row in rows if _is_template(row, job) and row.median_us]
    return [*templates[:2], *(row for row in rows if not _is_template(row, job))]


def write(jobs: Sequence[Job], path: Path) -> None:
    rows = [
        {**asdict(row), "median_us": row.median_us} for job in jobs for row in job.rows.values()
    ]
    path.write_text(json.dumps({"rows": rows}, indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=".", help="problems whose name matches")
    parser.add_argument("--seconds", type=float, default=4.0, help="for the rounds of a problem")
    parser.add_argument("--limit", type=float, default=330.0, help="seconds for everything")
    parser.add_argument("--peer", action="store_true", help="measure TorchInductor too")
    parser.add_argument("--build", action="store_true", help="compile for an H100 only")
    parser.add_argument("--whole", action="store_true", help="show every candidate")
    parser.add_argument("--most", type=int, default=MOST, help="templates of a problem")
    parser.add_argument("--templates", default="", help="templates whose name matches")
    parser.add_argument("--jobs", type=int, default=16, help="threads that compile")
    parser.add_argument("--out", type=Path, help="where results are written as JSON")
    return parser.parse_args()


def main() -> None:
    given, start, console = arguments(), time.perf_counter(), Console(width=170)
    context = context_of("sm_90" if given.build else None)
    jobs = []
    for case in [case for case in CASES if re.search(given.only, case.name)]:
        try:
            jobs.append(job_of(case, context, given.most, given.templates))
        except Exception:
            console.print(f"{case.name} has no plan:")
            traceback.print_exc()
    with ThreadPoolExecutor(given.jobs) as pool:
        made = [pool.submit(build, job, c, context) for job in jobs for c in job.choices]
        for each in made:
            each.result()
    console.print(f"{len(made)} candidates built in {time.perf_counter() - start:.1f} s")
    for job in jobs if not given.build else ():
        if time.perf_counter() - start > given.limit:
            console.print(f"out of time before {job.case.name}")
            break
        try:
            measure(job, context, given.seconds, other_runs(job.case, given.peer))
        except Exception:
            console.print(f"{job.case.name} failed:")
            traceback.print_exc()
        torch.cuda.empty_cache()
        if given.out:
            write(jobs, given.out)
        show([job], console, is_whole=given.whole)
    if given.build:
        show(jobs, console, is_whole=given.whole)
    if given.out:
        write(jobs, given.out)
    console.print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
