"""Contractions by measurement: each distinct matmul, with what follows it, raced on the GPU.

The library's call, followed by the kernel that reads its result, is the default. A template, or a
candidate of another source, takes its place where it is about as exact against a wider type, and
faster by a margin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from perfuse.autotune.device_kind import device_kind, generated_versions, library_versions
from perfuse.autotune.exactness import MOST_ERROR, reference_gate, reference_of
from perfuse.autotune.known_choices import with_known_choices
from perfuse.autotune.program_request import random_inputs
from perfuse.autotune.race import Gate, Rules, Timer
from perfuse.autotune.race_plans import PlanRace, race_plans
from perfuse.autotune.run_alone import identity_of
from perfuse.autotune.search import wall_timer
from perfuse.autotune.sites import plan_of_site, sites_of, with_choice
from perfuse.autotune.stored import is_consulted, stored_or_measured
from perfuse.backends import backend_of
from perfuse.cache import keys
from perfuse.candidates.site import Site
from perfuse.candidates.source import Offer
from perfuse.candidates.sources import (
    contraction_offers,
    fuses_epilogues,
    is_selected,
    is_timed_on_cpu,
)
from perfuse.context import Context
from perfuse.decision import Decision, Question, identified, unremembered
from perfuse.runtime.measure import event_timer
from perfuse.schedule.plan import Plan
from perfuse.selection import is_selecting
from perfuse.torch_compat.state import allows_tf32, disable_dispatch_modes, disabled_autocast

# Readings are the GPU's own, with caches flushed before each turn.
RULES = Rules(margin=0.98, budget_s=0.5, fewest_rounds=7, most_rounds=15)


def tune_templates(plan: Plan, context: Context) -> Plan:
    """Matmuls as measured on this GPU in the modes that tune, and by known choices in others."""
    if context.target.gpu is None:
        return plan
    timer = _timer(context)
    if is_selecting(context.settings) and timer is not None:
        with disable_dispatch_modes(), disabled_autocast():
            return measured_templates(plan, context, timer)
    if is_consulted(context):
        return measured_templates(plan, context, None)
    return plan if is_selecting(context.settings) else with_known_choices(plan, context)


def _timer(context: Context) -> Timer | None:
    """The clock of the device that candidates run on; None where they cannot be measured."""
    if is_timed_on_cpu(context):
        return wall_timer()
    is_there = torch.cuda.is_available() and not context.settings.gpu.interpret
    return event_timer(context.device) if is_there else None


def measured_templates(plan: Plan, context: Context, timer: Timer | None) -> Plan:
    """The plan with each site computed in the way that measured fastest.

    Without a timer, the ways are those that are remembered.
    """
    is_fused = context.settings.benchmark_epilogue_fusion and fuses_epilogues(context)
    decisions: dict[Question, Decision] = {}
    for site in list(sites_of(plan, with_epilogues=is_fused)):
        alone = plan_of_site(site, plan)
        offers = contraction_offers(site, alone.program, context)
        question = question_of(site, alone, context, offers)
        if question not in decisions:
            decisions[question] = decide(question, site, alone, context, timer, offers)
        plan = with_choice(plan, site, decisions[question].chosen)
    return replace(plan, decisions=(*plan.decisions, *decisions.values()))


def question_of(site: Site, alone: Plan, context: Context, offers: Mapping[str, Offer]) -> Question:
    """The question which way to compute a site is fastest on this kind of GPU.

    The text of the first challenger stands for them all: an edit of Perfuse that does not change it
    keeps the decision.
    """
    gpu = context.target.gpu
    assert gpu is not None
    choices = [choice for offer in offers.values() for choice in offer.choices]
    text = f"{identity_of(alone)} tf32 {allows_tf32()}"
    if len(choices) > 1:
        first = with_choice(alone, site, choices[1])
        text += "".join(backend_of(context.target).generate(first, context).texts)
    versions = [version for offer in offers.values() for version in offer.versions]
    return Question(
        keys.TEMPLATE.name,
        identified(str(site).partition(" with ")[0], text),
        tuple(choices),
        device_kind(context.target),
        (*library_versions(gpu.kind), *generated_versions(), *versions),
        f"{RULES} {MOST_ERROR}" + ("" if is_selected(choices[0], context) else ", without ATEN"),
    )


def decide(
    question: Question,
    site: Site,
    alone: Plan,
    context: Context,
    timer: Timer | None,
    offers: Mapping[str, Offer],
) -> Decision:
    """The remembered decision for a site on this kind of GPU, or a new one."""

    def measure() -> Decision:
        inputs = random_inputs(alone.program, context.device)
        plan_of = partial(with_choice, alone, site)
        rivals = PlanRace(str(site), question.problem, question.candidates, plan_of, inputs)
        gate = gate_of(site, alone, inputs, context)
        silent = {name: offer.reason for name, offer in offers.items() if offer.reason}
        made = race_plans(rivals, gate, RULES, context, timer, silent)
        is_usable = all(offer.is_usable for offer in offers.values())
        return made if is_usable else unremembered(made)

    measured = None if timer is None else measure
    return stored_or_measured(question, str(site), context, measured, "autotune.sites_measured")


def gate_of(site: Site, alone: Plan, inputs: Mapping[str, Tensor], context: Context) -> Gate:
    """Challengers have to be about as exact as the library's call and the kernel after it."""
    return reference_gate(reference_of(site.contracted, site.epilogue, alone, inputs, context))
