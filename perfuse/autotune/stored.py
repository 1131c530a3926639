"""Decisions found or made: the one place where a tuner asks for one.

What is remembered (`cache/decisions.py`) is used; else the candidates are measured and the decision
is remembered, unless this mode measures nothing or the time limit for tuning was reached: then the
default stays. A decision that the time limit cut short is used, but not remembered.
"""

from collections.abc import Callable
from dataclasses import replace

from perfuse.autotune.time_limit import seconds_left
from perfuse.cache.decisions import decision_stores, has_lock_file
from perfuse.context import Context
from perfuse.decision import OUT_OF_TIME, Decision, Question, undecided
from perfuse.logs import channel
from perfuse.selection import is_library_allowed

Measure = Callable[[], Decision]


def is_consulted(context: Context) -> bool:
    """Whether remembered decisions are used where nothing is measured."""
    return context.settings.search_autotune_cache or has_lock_file(context)


def stored_or_measured(
    question: Question, subject: str, context: Context, measure: Measure | None, counter: str
) -> Decision:
    """The decision on a question, with the subject as this program names it.

    Without `measure` it is a remembered one, else the default; a new measurement is counted.
    """
    is_pinned_only = measure is None and not context.settings.search_autotune_cache
    stores = decision_stores(context, is_pinned_only=is_pinned_only)
    for place, store in enumerate(stores):
        found = store.look_up(question)
        if found is not None:
            for earlier in stores[:place]:
                earlier.remember(question, found)
            context.counters.inc("autotune.cache_hit")
            context.counters.inc(f"autotune.{store.name}_hit")
            return replace(found, subject=subject)
    if measure is None:
        context.counters.inc("autotune.undecided")
        return undecided(subject, question)
    # Where there is no default to take, some candidate has to be measured.
    if not seconds_left(context) and is_library_allowed(context.settings):
        context.counters.inc("autotune.out_of_time")
        return undecided(subject, question, OUT_OF_TIME)
    decision = replace(measure(), subject=subject, question=question)
    context.counters.inc(counter)
    channel("tuning").info("%s (%s)", decision, decision.reason)
    for store in stores if decision.is_final else ():
        store.remember(question, decision)
    return decision
