"""Contractions to test with: a function's matmuls as generated kernels, computed by a template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from perfuse.backends import backend_of
from perfuse.build.bundle import CodeObject, read_bundle
from perfuse.codegen.triton.sources import TritonSources
from perfuse.codegen.triton.templates.template import Template
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.gpu import gpu_of_name
from perfuse.ir.program import Matmul
from perfuse.schedule.contract import contracted, contracted_with, with_contraction
from perfuse.schedule.plan import Kernel, Plan, with_template
from perfuse.schedule.schedule import place
from perfuse.schedule.verify import verify_plan
from perfuse.target import device_target, gpu_target
from tests.unit.planning import plans_of


def context_for(name: str, *, interpret: bool = False) -> Context:
    """The context of a GPU by its name, under the current settings."""
    settings = Context.default().settings
    settings = replace(settings, gpu=replace(settings.gpu, interpret=interpret))
    return Context(gpu_target(settings, gpu_of_name(name)), settings, Counters())


@dataclass(frozen=True)
class Problem:
    """A function of matrices; its last kernel, if there is one, is the epilogue."""

    name: str
    fn: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    dynamic: bool = False

    def __str__(self) -> str:
        return self.name

    def planned(self, context: Context) -> Plan:
        (plan,) = plans_of(self.fn, *self.inputs, dynamic=self.dynamic, context=context)
        return plan


def contracted_plan(plan: Plan, template: Template, context: Context) -> Plan:
    """The plan with its matmuls, and the kernel that reads them, computed by a template."""
    matmuls = [step for step in plan.steps if isinstance(step, Matmul)]
    readers = [k for k in plan.kernels if {m.out for m in matmuls} & set(k.reads())]
    if readers:
        read = [m for m in matmuls if m.out in readers[0].reads()]
        made = [contracted_with(read, readers[0], plan)]
    else:
        made = [contracted(matmul, plan.program) for matmul in matmuls]
    for kernel in made:
        assert isinstance(kernel, Kernel), kernel
        plan = with_template(with_contraction(plan, kernel), kernel.name, template.choice)
    plan = place(plan, context)
    verify_plan(plan)
    return plan


def sources_of(problem: Problem, template: Template, target: str) -> TritonSources:
    context = context_for(target)
    plan = contracted_plan(problem.planned(context), template, context)
    made: TritonSources = backend_of(context.target).generate(plan, context)
    return made


def objects_of(sources: TritonSources, context: Context) -> tuple[CodeObject, ...]:
    """The machine code of every kernel."""
    (entry,) = backend_of(context.target).build(sources, context)
    return read_bundle(entry.read_bytes).objects


def context_here(device: str) -> Context:
    """The GPU of this machine, or an interpreter in its place: Triton's, or that of gfx942."""
    if device == "cpu":
        return context_for("sm_90", interpret=True)
    if device.startswith("gfx"):
        return context_for(device, interpret=True)
    context, own = Context.default(), torch.device(device, 0)
    return replace(context, target=device_target(context.settings, own), device=own)


def run(
    problem: Problem, template: Template, inputs: tuple[Tensor, ...] | None = None,
    device: str = "cpu",
) -> Any:  # fmt: skip
    """The results of a problem on a GPU, or in an interpreter."""
    context = context_here(device)
    plan = contracted_plan(problem.planned(context), template, context)
    backend = backend_of(context.target)
    sources = backend.generate(plan, context)
    built = backend.build(sources, context)
    host = backend.host(plan, sources, context)
    call = backend.load(host, built, plan.program.constants, context)
    given = problem.inputs if inputs is None else inputs
    sizes = [name for name in plan.program.inputs if name not in plan.program.buffers]
    assert len(sizes) + len(given) == len(plan.program.inputs), plan.program.inputs
    arguments: list[Any] = _with_sizes(plan, list(given))
    with torch.no_grad():
        return call(arguments)


def _with_sizes(plan: Plan, given: list[Tensor]) -> list[Any]:
    """The tensors, and the sizes that a dynamic graph takes beside them."""
    tensors = iter(given)
    placed = {n: next(tensors) for n in plan.program.inputs if n in plan.program.buffers}
    values: dict[str, int] = {}
    for name, tensor in placed.items():
        for dim, size in zip(plan.program.buffers[name].shape, tensor.shape, strict=True):
            values[repr(dim)] = size
    return [placed.get(n, values.get(n)) for n in plan.program.inputs]
