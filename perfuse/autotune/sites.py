"""Sites: matmuls of a plan with the kernel that reads them, and the ways to compute each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perfuse.autotune.run_alone import are_sizes_shown, plan_of_steps
from perfuse.codegen.ck.launch import SOURCE as CK
from perfuse.codegen.triton.templates.propose import MOST, is_mixed, problem_of, proposed
from perfuse.codegen.triton.templates.template import FUSED, SOURCE, Template
from perfuse.decision import Choice, library
from perfuse.gpu import Gpu, Platform
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
from perfuse.schedule.plan import Kernel, Plan, Step, with_template
from perfuse.schedule.read_stored import read_stored
from perfuse.schedule.size_hints import value_of


@dataclass(frozen=True, slots=True)
class Site:
    """Matmuls, the kernel that reads their results if there is one, and both as one kernel.

    Templates widen int8 operands while they read them; for the library, kernels do so before.
    """

    matmuls: tuple[Matmul, ...]
    epilogue: Kernel | None
    alone: tuple[Kernel, ...]  # a contraction for each matmul; empty where one has none
    fused: Kernel | None
    widening: tuple[Kernel, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        last = () if self.epilogue is None else (self.epilogue,)
        return (*self.widening, *self.matmuls, *last)

    @property
    def contracted(self) -> tuple[Matmul, ...]:
        """The matmuls as templates compute them: of operands as they are stored."""
        found = [self.fused] if self.fused is not None else self.alone
        made = [k.contraction.matmuls for k in found if k is not None and k.contraction is not None]
        return tuple(matmul for matmuls in made for matmul in matmuls)

    def __str__(self) -> str:
        sizes = ", ".join("x".join(map(repr, sizes_of(m))) for m in self.matmuls)
        ops = " and ".join(dict.fromkeys(m.op.split(".")[1] for m in self.matmuls))
        return f"{ops} {sizes}" + ("" if self.epilogue is None else f" with {self.epilogue.name}")


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
    every = [m for m in read if m.out not in seen and _is_large(m, plan)]
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


# -- choices -------------------------------------------------------------------------------


def choices_of(
    site: Site, program: Program, gpu: Gpu, tf32: bool, most: int = MOST
) -> list[Choice]:
    """Ways to compute a site: the library first, then templates by rank."""
    precisions = ("ieee", "bf16x6", "tf32x3") if gpu.kind is Platform.CUDA else ("ieee",)
    if tf32 and gpu.kind is Platform.CUDA:
        precisions = ("tf32", *precisions)
    found = [library(site.matmuls[0].op)]
    if site.fused is not None:
        found += _templates(site.fused, program, gpu, precisions, most, is_fused=True)
    if len(site.alone) == 1:
        fewer = None if site.fused is None else most // 2  # the fused ones are more promising
        found += _templates(site.alone[0], program, gpu, precisions, most, is_fused=False)[:fewer]
    return found


def _templates(
    kernel: Kernel, program: Program, gpu: Gpu, precisions: tuple[str, ...], most: int,
    *, is_fused: bool,
) -> list[Choice]:  # fmt: skip
    problem = problem_of(kernel, program.buffers, program.hints)
    templates = [] if problem is None else proposed(problem, gpu, precisions, most)
    return [choice_of_template(template, is_fused=is_fused) for template in templates]


def choice_of_template(template: Template, *, is_fused: bool) -> Choice:
    """The choice of a template, with or without the kernel after the matmul inside."""
    made = template.choice
    name = f"{made.name}, fused" if is_fused else made.name
    return Choice(SOURCE, name, (*made.options, (FUSED, is_fused)))


def chosen_kernels(site: Site, choice: Choice) -> tuple[Kernel, ...]:
    """The contractions that a choice asks for; none for the library."""
    if choice.source == CK:
        return site.alone
    if choice.source != SOURCE:
        return ()
    if dict(choice.options).get(FUSED):
        assert site.fused is not None
        return (site.fused,)
    return site.alone


def with_choice(plan: Plan, site: Site, choice: Choice) -> Plan:
    """The plan with a site computed as a choice says."""
    if chosen_kernels(site, choice):
        plan = _as_stored(plan, site.matmuls).plan
    for kernel in chosen_kernels(site, choice):
        plan = with_contraction(plan, kernel)
        plan = with_template(plan, kernel.name, choice)
    return plan


# -- a plan of one site --------------------------------------------------------------------


def plan_of_site(site: Site, plan: Plan) -> Plan:
    """A plan of a site alone: what it reads is given, what others need of it is returned."""
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
