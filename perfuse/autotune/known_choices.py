"""Choices that are known to win on a kind of GPU: default mode takes them without measuring.

A row names a class of matmuls, not single sizes, and the template that beat the library clearly
wherever the class was measured. Matmuls of float32 are in a row only where the template's error is
no more than the library's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from perfuse.autotune.device_kind import device_kind
from perfuse.autotune.sites import sites_of, with_choice
from perfuse.candidates.site import Site
from perfuse.candidates.triton import choice_of_template
from perfuse.codegen.triton.templates.propose import (
    HALVES,
    ContractionFacts,
    facts_of,
    why_too_large,
)
from perfuse.codegen.triton.templates.template import POINTERS, VECTOR, Template
from perfuse.context import Context
from perfuse.decision import Choice, Decision, unmeasured
from perfuse.gpu import Gpu
from perfuse.ir.dtype import DType
from perfuse.schedule.plan import Plan

H200 = "cuda sm_90, 132 multiprocessors, about 5 TB/s"
_RESULTS = "benchmarks/results/2026-11-16-h200-matmuls"


@dataclass(frozen=True, slots=True)
class KnownChoice:
    """A class of matmuls on a kind of GPU, and the template that wins there."""

    name: str
    device: str  # as `device_kind` names it
    holds: Callable[[ContractionFacts, Gpu], bool]
    template: Template
    measured: str  # how it compared with the library, and where that is recorded


def _is_long_vector(facts: ContractionFacts, gpu: Gpu) -> bool:
    """One half-precision row times a K-contiguous matrix that is read once and not cached."""
    is_vector = facts.rows == facts.batch == facts.num_accumulators == 1
    (depth,) = facts.depths if len(facts.depths) == 1 else (0,)
    is_large = depth >= 2048 and depth * facts.columns >= 1 << 24
    return is_vector and facts.along_depth and facts.dtype in HALVES and is_large


def _is_shallow_sum(facts: ContractionFacts, gpu: Gpu) -> bool:
    """a @ b + c @ d in float32, with K so small that six half-precision products are more exact.

    An operand beyond the largest bfloat16, 3.39e38, counts as infinite.
    """
    is_sum = len(facts.depths) == facts.num_accumulators == 2 and facts.batch == 1
    tiles = ceil(facts.rows / 64) * ceil(facts.columns / 64)
    is_wide = tiles >= gpu.multiprocessors and max(facts.depths) <= 128
    return is_sum and is_wide and facts.dtype is DType.F32


KNOWN: list[KnownChoice] = [
    KnownChoice(
        "one row times a K-contiguous matrix",
        H200,
        _is_long_vector,
        Template(VECTOR, 1, 1, 2048, 4, 1),
        f"1.06 times the library's speed at 1x4096x14336 ({_RESULTS})",
    ),
    KnownChoice(
        "a@b + c@d in float32 with small K",
        H200,
        _is_shallow_sum,
        Template(POINTERS, 64, 64, 32, 4, 3, precision="bf16x6"),
        f"1.84 times the library's speed at 2048x1536x64, with half its error ({_RESULTS})",
    ),
]


def with_known_choices(plan: Plan, context: Context) -> Plan:
    """The plan with each matmul of a known class computed by the template that wins there."""
    rows = [row for row in KNOWN if row.device == device_kind(context.target)]
    if not rows or not context.settings.gpu.known_templates:
        return plan
    for site in list(sites_of(plan)):
        found = _known(site, plan, rows, context)
        if found is not None:
            row, choice = found
            made = with_choice(plan, site, choice)
            plan = replace(made, decisions=(*made.decisions, _decision(site, choice, row)))
    return plan


def _known(
    site: Site, plan: Plan, rows: list[KnownChoice], context: Context
) -> tuple[KnownChoice, Choice] | None:
    """The row of a site, and its template with the epilogue inside where there is one."""
    gpu, kernel = context.target.gpu, site.fused or (site.alone[0] if site.alone else None)
    if gpu is None or kernel is None:
        return None
    facts = facts_of(kernel, plan.program.buffers, plan.program.hints)
    if facts is None or not facts.is_static:
        return None
    for row in rows:
        if row.holds(facts, gpu) and not why_too_large(row.template, facts, gpu):
            return row, choice_of_template(row.template, is_fused=site.fused is not None)
    return None


def _decision(site: Site, choice: Choice, row: KnownChoice) -> Decision:
    rivals = unmeasured((site.default, choice))
    return Decision(str(site), choice, rivals, f"{row.name}: {row.measured}")
