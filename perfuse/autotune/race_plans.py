"""A race of plans: ways to compute the same steps, each verified in guarded memory, then timed.

The library's way is the default. Before a challenger is timed it runs with its results poisoned and
between guard bands, here and, where settings ask for workers, in one of those first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from perfuse.autotune.compile_together import compile_together, num_compile_threads
from perfuse.autotune.progress import TuningProgress
from perfuse.autotune.race import Gate, Rules, Run, Timer
from perfuse.autotune.race_selected import NOTHING_SILENT, race_selected
from perfuse.autotune.run_alone import built, loaded
from perfuse.autotune.screen import screened
from perfuse.autotune.time_limit import OutOfTime
from perfuse.candidates.sources import report_failures
from perfuse.context import Context
from perfuse.decision import LATE, Choice, Decision, Refusal, unremembered
from perfuse.logs import channel
from perfuse.schedule.plan import Plan
from perfuse.schedule.schedule import place

LOG = channel("tuning")


@dataclass(frozen=True, slots=True)
class PlanRace:
    """The choices for a problem, the library's first, and the plan of each, which runs alone."""

    subject: str
    problem: str  # what identifies it
    choices: tuple[Choice, ...]
    plan_of: Callable[[Choice], Plan]  # not placed yet
    inputs: Mapping[str, Tensor]  # by the names that the plans give them

    def placed(self, choice: Choice, context: Context, *, is_guarded: bool = False) -> Plan:
        """The plan of a choice; if guarded, its host program checks the memory of each buffer."""
        return place(replace(self.plan_of(choice), is_guarded=is_guarded), context)

    def run(self, choice: Choice, context: Context, *, is_guarded: bool = False) -> Run:
        """A callable that computes a choice on the inputs."""
        plan = self.placed(choice, context, is_guarded=is_guarded)
        call, given = loaded(plan, context), [self.inputs[name] for name in plan.program.inputs]
        return lambda: call(list(given))


def race_plans(
    rivals: PlanRace,
    gate: Gate,
    rules: Rules,
    context: Context,
    timer: Timer | None = None,
    silent: Mapping[str, str] = NOTHING_SILENT,
) -> Decision:
    """Compile all, verify each, and race what is left; the library's way, or an error, if none."""
    errors = _compiled(rivals, context)
    late = [choice for choice in rivals.choices if isinstance(errors.get(choice), OutOfTime)]
    made = race_selected(
        rivals.subject,
        rivals.choices,
        lambda choice: rivals.run(choice, context),
        rules,
        context,
        gate=gate,
        timer=timer,
        screen=partial(_refused, rivals, late, context),
        silent=silent,
        guarded=lambda choice: rivals.run(choice, context, is_guarded=True),
        problem=rivals.problem,
    )
    has_failed = report_failures({c: e for c, e in errors.items() if c not in late})
    return unremembered(made) if has_failed else made


def _compiled(rivals: PlanRace, context: Context) -> dict[Choice, Exception]:
    """Compile candidates in parallel, and show how many are left; the errors of those that fail.

    One that fails will fail again where it is measured.
    """
    with TuningProgress(rivals.subject, len(rivals.choices)) as progress:

        def build(choice: Choice) -> None:
            try:
                built(rivals.placed(choice, context), context)
            finally:
                left = progress.advance()
                LOG.info("%s: %s is compiled, %d left", rivals.subject, choice, left)

        builds = [(choice, partial(build, choice)) for choice in rivals.choices]
        num_threads = num_compile_threads(context, len(builds))
        return compile_together(builds, num_threads, context.counters, context.tune_until)


def _refused(
    rivals: PlanRace, late: Sequence[Choice], context: Context, choices: Sequence[Choice]
) -> dict[Choice, Refusal]:
    """Why choices must not run in this process."""
    asked = [choice for choice in choices if choice not in late]
    plans_of = partial(_plans, rivals, context)
    return {
        **dict.fromkeys(late, LATE),
        **screened(rivals.problem, asked, plans_of, context),
    }


def _plans(rivals: PlanRace, context: Context, choice: Choice) -> tuple[Plan, Plan]:
    plain = rivals.placed(choice, context)
    return plain, rivals.placed(choice, context, is_guarded=True)
