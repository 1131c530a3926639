"""The sites of a plan: where they are, each as a plan of its own, and the plan with a choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perfuse.autotune.run_alone import are_sizes_shown, plan_of_steps
from perfuse.candidates.site import Site
from perfuse.codegen.triton.templates.propose import is_mixed
from perfuse.decision import Choice
from perfuse.ir import index as ix
from perfuse.ir.program import BufferKind, Matmul, Program
from perfuse.schedule.arena import output_buffers
from perfuse.schedule.contract import (
    contracted,
    contracted_with,
    depth_of,
    sizes_of,
    with_contraction,
)
from perfuse.schedule.plan import Kernel, Plan, with_template
from perfuse.schedule.read_stored import read_stored
from perfuse.schedule.size_hints import value_of


def sites_of(plan: Plan, *, with_epilogues: bool = True) -> Iterator[Site]:
    """The sites of a plan, each matmul in one: in order, as large as they can be."""
    seen: set[str] = set()  # results of matmuls, and kernels that are the epilogue of one
    for matmul in [step for step in plan.steps if isinstance(step, Matmul)]:
        if matmul.out in seen or not _is_large(matmul, plan):
            continue
        site = _with_epilogue(matmul, plan, seen) if with_epilogues else None
        if site is None:
            site = _without_epilogue(matmul, plan)
        if site is not None and are_sizes_shown(plan_of_site(site, plan)):
            seen |= {m.out for m in site.matmuls}
            seen |= set() if site.epilogue is None else {site.epilogue.name}
            yield site


def _is_large(matmul: Matmul, plan: Plan) -> bool:
    """Whether it is worth measuring; dynamic sizes count as their likely values."""
    work = value_of(ix.product((*sizes_of(matmul), depth_of(matmul))), plan.program.hints)
    return work > plan.thresholds.gpu_loop_matmul_work


def _without_epilogue(matmul: Matmul, plan: Plan) -> Site | None:
    stored = _as_stored(plan, [matmul])
    made = contracted(stored.matmuls[0], stored.plan.program)
    if not isinstance(made, Kernel):
        return None
    return Site((matmul,), None, (made,), None, stored.widening)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A plan in which matmuls read int8 operands, and the kernels that it no longer needs."""

    plan: Plan
    matmuls: tuple[Matmul, ...]
    widening: tuple[Kernel, ...]


def _as_stored(plan: Plan, matmuls: Sequence[Matmul]) -> _Stored:
    own: list[Matmul] = []
    widening: list[Kernel] = []
    for matmul in matmuls:
        found = read_stored(plan, matmul)
        if found.widening and is_mixed(found.matmul, found.plan.program.buffers):
            plan = found.plan
            own.append(found.matmul)
            widening += found.widening
        else:
            own.append(matmul)
    return _Stored(plan, tuple(own), tuple(widening))


def _with_epilogue(matmul: Matmul, plan: Plan, seen: set[str]) -> Site | None:
    reader = next((k for k in plan.kernels if matmul.out in k.reads()), None)
    if reader is None or reader.name in seen:
        return None
    if any(_is_input(name, plan.program) for name in reader.stored):
        return None  # measuring it again and again would change what it reads
    read = [s for s in plan.steps if isinstance(s, Matmul) and s.out in reader.reads()]
    alike = [m for m in read if bool(m.operands.scales) == bool(matmul.operands.scales)]
    every = [m for m in alike if m.out not in seen and _is_large(m, plan)]
    for chosen in [every, [matmul]] if len(every) > 1 else [[matmul]]:
        stored = _as_stored(plan, chosen)
        same = next(k for k in stored.plan.kernels if k.name == reader.name)
        fused = contracted_with(stored.matmuls, same, stored.plan)
        if isinstance(fused, Kernel):
            made = [contracted(m, stored.plan.program) for m in stored.matmuls]
            alone = tuple(kernel for kernel in made if isinstance(kernel, Kernel))
            whole = alone if len(alone) == len(chosen) else ()
            return Site(tuple(chosen), reader, whole, fused, stored.widening)
    return None


def _is_input(name: str, program: Program) -> bool:
    return program.buffers[name].kind is BufferKind.INPUT


def with_choice(plan: Plan, site: Site, choice: Choice) -> Plan:
    """The plan with a site computed as a choice says."""
    kernels = site.kernels(choice)
    if kernels:
        plan = _as_stored(plan, site.matmuls).plan
    for kernel in kernels:
        plan = with_contraction(plan, kernel)
        plan = with_template(plan, kernel.name, choice)
    return plan


# -- a plan of one site --------------------------------------------------------------------


def plan_of_site(site: Site, plan: Plan) -> Plan:
    """A plan of a site alone: the buffers it reads are arguments, those others need results."""
    return plan_of_steps(site.steps, plan, _needed(site, plan))


def _needed(site: Site, plan: Plan) -> set[str]:
    """The results of a site that others read, or that the program returns."""
    if site.epilogue is None:
        return {site.matmuls[0].out}
    assert site.fused is not None
    return set(site.fused.stored) & (output_buffers(plan.program) | _read_elsewhere(site, plan))


def _read_elsewhere(site: Site, plan: Plan) -> set[str]:
    others = [step for step in plan.steps if step not in site.steps]
    return {name for step in others for name in step.reads()}
