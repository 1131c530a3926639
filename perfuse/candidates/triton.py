"""Triton templates as a source: those that can compute a site, by rank."""

from __future__ import annotations

from perfuse.candidates.site import Site
from perfuse.candidates.source import Offer
from perfuse.codegen.triton.templates.propose import MOST, facts_of, proposed
from perfuse.codegen.triton.templates.template import SOURCE, Template
from perfuse.context import Context
from perfuse.decision import FUSED, Choice
from perfuse.gpu import Gpu, Platform
from perfuse.ir.program import Program
from perfuse.schedule.plan import Kernel
from perfuse.torch_compat.state import allows_tf32


def template_choices(
    site: Site, program: Program, gpu: Gpu, tf32: bool, most: int = MOST
) -> list[Choice]:
    """The templates that compute a site, those that fuse its epilogue first."""
    precisions = ("ieee", "bf16x6", "tf32x3") if gpu.kind is Platform.CUDA else ("ieee",)
    if tf32 and gpu.kind is Platform.CUDA:
        precisions = ("tf32", *precisions)
    found: list[Choice] = []
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
    facts = facts_of(kernel, program.buffers, program.hints)
    templates = [] if facts is None else proposed(facts, gpu, precisions, most)
    return [choice_of_template(template, is_fused=is_fused) for template in templates]


def choice_of_template(template: Template, *, is_fused: bool) -> Choice:
    """The choice of a template, with or without the kernel after the matmul inside."""
    made = template.choice
    name = f"{made.name}, fused" if is_fused else made.name
    return Choice(SOURCE, name, (*made.options, (FUSED, is_fused)))


def template_offer(site: Site, program: Program, context: Context) -> Offer:
    """The templates that are proposed for a site."""
    gpu = context.target.gpu
    assert gpu is not None
    choices = tuple(template_choices(site, program, gpu, allows_tf32()))
    return Offer(choices, "" if choices else "no template computes it")
