"""Templates ranked without the GPU: compiled for it, their resources read, their time predicted.

A candidate that cannot be built is last, one that spills registers behind those that do not, and
the others are in the order of the model. Nothing is measured, so nothing here compares a template
with the library's call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from perfuse.autotune.compile_together import compile_together, num_compile_threads
from perfuse.autotune.run_alone import built
from perfuse.autotune.sites import plan_of_site, sites_of, with_choice
from perfuse.autotune.templates import question_of
from perfuse.build.bundle import CodeObject, read_bundle
from perfuse.candidates.site import Site
from perfuse.candidates.sources import TRITON, contraction_offers
from perfuse.codegen.triton.templates.propose import Model, facts_of, moved_seconds
from perfuse.codegen.triton.templates.template import SOURCE, Template
from perfuse.context import Context
from perfuse.decision import FUSED, Choice, Decision, Question, ranked
from perfuse.schedule.plan import Plan
from perfuse.schedule.schedule import place


@dataclass(frozen=True, slots=True)
class RankedTemplate:
    """A template for a problem: its predicted time, and what a block of it needs."""

    choice: Choice
    predicted_us: float
    num_registers: int = 0  # of a thread
    spilled_bytes: int = 0  # of a thread
    shared_bytes: int = 0  # of a block
    failure: str = ""  # why it cannot be built


@dataclass(frozen=True, slots=True)
class Ranking:
    """The candidates for one problem, the most promising first."""

    subject: str
    question: Question
    candidates: tuple[RankedTemplate, ...]

    def decision(self, most: int) -> Decision | None:
        """The decision for the first, among the first few; None where none can be taken unseen.

        Products rounded to tf32 are not: they may be less exact than the library's.
        """
        order = [c.choice for c in self.candidates if not c.failure and _is_exact(c.choice)][:most]
        if not order:
            return None
        return ranked(self.subject, replace(self.question, candidates=tuple(order)), order)


def _is_exact(choice: Choice) -> bool:
    return Template.of(choice).precision != "tf32"


def rank_templates(plan: Plan, context: Context) -> list[Ranking]:
    """The templates for each distinct matmul of a plan that is not tuned yet."""
    found: dict[Question, Ranking] = {}
    for site in sites_of(plan):
        alone = plan_of_site(site, plan)
        offers = contraction_offers(site, alone.program, context, among=[TRITON.name])
        question = question_of(site, alone, context, offers)
        choices = [choice for choice in question.candidates if choice.source == SOURCE]
        if question not in found and choices:
            made = _candidates(site, alone, choices, context)
            order = sorted(made, key=lambda c: (bool(c.failure), c.spilled_bytes > 0))
            found[question] = Ranking(str(site), question, tuple(order))
    return list(found.values())


def _candidates(
    site: Site, alone: Plan, choices: Sequence[Choice], context: Context
) -> list[RankedTemplate]:
    """Each choice with what the compiler makes of it, in the order of predicted times."""
    objects: dict[Choice, Sequence[CodeObject]] = {}

    def build(choice: Choice) -> None:
        _, entries = built(place(with_choice(alone, site, choice), context), context)
        objects[choice] = read_bundle(entries[0].read_bytes).objects

    builds = [(choice, partial(build, choice)) for choice in choices]
    errors = compile_together(builds, num_compile_threads(context, len(builds)), context.counters)
    found = [
        _candidate(choice, _seconds(site, alone, choice, context), objects.get(choice, ()))
        for choice in choices
    ]
    lines = {choice: f"{type(e).__name__}: {e}".splitlines()[0] for choice, e in errors.items()}
    every = [replace(c, failure=lines.get(c.choice, "")) for c in found]
    return sorted(every, key=lambda candidate: candidate.predicted_us)


def _candidate(choice: Choice, seconds: float, objects: Sequence[CodeObject]) -> RankedTemplate:
    needs = [(o.num_registers, o.stack_bytes, o.shared_bytes) for o in objects] or [(0, 0, 0)]
    registers, spilled, shared = (max(column) for column in zip(*needs, strict=True))
    return RankedTemplate(choice, round(1e6 * seconds, 1), registers, spilled, shared)


def _seconds(site: Site, alone: Plan, choice: Choice, context: Context) -> float:
    """The predicted time of a template, and of the kernel after it where that is not fused."""
    gpu, program = context.target.gpu, alone.program
    assert gpu is not None
    (kernel,) = site.kernels(choice)
    facts = facts_of(kernel, program.buffers, program.hints)
    assert facts is not None
    seconds = Model.of(gpu).seconds(Template.of(choice), facts)
    if site.epilogue is None or dict(choice.options).get(FUSED):
        return seconds
    return seconds + moved_seconds(site.epilogue.num_bytes, gpu)
