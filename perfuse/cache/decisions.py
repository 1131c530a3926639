"""Where decisions are remembered: pinned in a lock file, in the local store, on a shared server.

They are asked in this order, from the strictest to the slowest. What one of them has is remembered
by those asked before it, and what is measured is remembered by all; only `perfuse lock` writes a
lock file.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from typing import Protocol

from perfuse.cache.access import open_store
from perfuse.cache.keys import DECISIONS, decision_key
from perfuse.cache.lock_file import LockFile, Pinned, read_lock
from perfuse.cache.remote import RemoteDecisions
from perfuse.cache.store import Store
from perfuse.context import Context
from perfuse.decision import Choice, Decision, Question, answer_from, unmeasured
from perfuse.errors import MALFORMED, CacheDamaged, LockFileWarning
from perfuse.logs import channel

FILE = "decision.json"
LOG = channel("tuning")


class DecisionStore(Protocol):
    """A place that remembers decisions. It never raises because of its contents."""

    name: str

    def look_up(self, question: Question) -> Decision | None:
        """The decision on this question, with one of its candidates; None: not known here."""

    def remember(self, question: Question, decision: Decision) -> None:
        """Keep a decision for the next time."""


def decision_stores(context: Context, *, is_pinned_only: bool = False) -> list[DecisionStore]:
    """The places that the settings name, in the order in which they are asked."""
    settings = context.settings
    lock = _lock(context)
    stores: list[DecisionStore] = [] if lock is None else [lock]
    if settings.cache.enabled and settings.autotune_local_cache and not is_pinned_only:
        stores.append(LocalDecisions(open_store(context)))
    if settings.autotune_remote_cache and not is_pinned_only:
        stores.append(RemoteDecisions(context))
    return stores


def has_lock_file(context: Context) -> bool:
    """Whether choices are pinned, in whatever mode; a file that is missing is reported later."""
    return bool(context.settings.lock_file)


def _lock(context: Context) -> PinnedDecisions | None:
    path = context.settings.lock_file
    if not path:
        return None
    lock = read_lock(path)
    if lock is None:
        message = f"the lock file {path} does not exist: no choice is pinned"
        warnings.warn(message, LockFileWarning, stacklevel=4)
        return None
    return PinnedDecisions(path, lock, context)


class LocalDecisions:
    """Decisions in the store of this machine."""

    name = "local"

    def __init__(self, store: Store) -> None:
        self._store = store

    def look_up(self, question: Question) -> Decision | None:
        """The stored decision; one that is damaged or of another question is removed."""
        key = decision_key(question)
        entry = self._store.get(key)
        if entry is None:
            return None
        try:
            return answer_from(entry.read_json(FILE), question)
        except (CacheDamaged, *MALFORMED):
            self._store.discard(key)
            return None

    def remember(self, question: Question, decision: Decision) -> None:
        """Store a decision; of several processes that do, the first is kept."""
        text = json.dumps(decision.to_json(), indent=1)
        self._store.put(decision_key(question), {FILE: text.encode()})


def stored_decisions(store: Store) -> Iterator[Decision]:
    """Every decision in a store that can be read, in the order of their keys."""
    for key in sorted(usage.key for usage in store.usages()):
        entry = store.get(key) if key.partition("-")[0] in DECISIONS else None
        try:
            found = None if entry is None else Decision.from_json(entry.read_json(FILE))
        except (CacheDamaged, *MALFORMED):
            continue
        if found is not None and found.question and decision_key(found.question) == key:
            yield found


class PinnedDecisions:
    """Decisions of a lock file. What does not match is reported, and decided elsewhere."""

    name = "lock"

    def __init__(self, path: str, lock: LockFile, context: Context) -> None:
        self._path = path
        self._lock = lock
        self._counters = context.counters

    def look_up(self, question: Question) -> Decision | None:
        """The pinned decision, if it is for this kind of device, versions and candidates."""
        entries = self._lock.of_problem(question)
        if not entries:
            self._report("missing", question, "has no choice for some problems")
            return None
        found = _fitting(entries, question)
        if isinstance(found, str):
            self._report("unfit", question, found)
            return None
        rivals = unmeasured(question.candidates)
        return Decision(question.problem, found, rivals, f"pinned by {self._path}", question)

    def remember(self, question: Question, decision: Decision) -> None:
        """Do nothing: only `perfuse lock write` changes pinned choices."""

    def _report(self, counted: str, question: Question, message: str) -> None:
        self._counters.inc(f"autotune.lock_{counted}")
        LOG.warning("the lock file %s %s (%s)", self._path, message, question.problem)
        warnings.warn(
            f"the lock file {self._path} {message}; these choices are made without it. "
            "`perfuse lock check` shows what fits, `perfuse lock write` adds what is missing.",
            LockFileWarning,
            stacklevel=4,
        )


def _fitting(entries: Sequence[Pinned], question: Question) -> Choice | str:
    """The candidate that is pinned for this device and these versions, or why there is none."""
    here = [entry for entry in entries if entry.device == question.device]
    if not here:
        devices = "; ".join(sorted({entry.device for entry in entries}))
        return f"is for another kind of device ({devices}), not for {question.device}"
    fitting = [entry for entry in here if dict(entry.versions) == dict(question.versions)]
    if not fitting:
        return f"is for other versions ({_difference(here[0], question)})"
    (entry,) = fitting
    chosen = entry.chosen_of(question.candidates)
    return chosen or f"pins {entry.chosen} for {entry.problem}, which is not a candidate here"


def _difference(entry: Pinned, question: Question) -> str:
    here = dict(question.versions)
    rows = [
        f"{name} {there}, here {here.get(name, 'none')}"
        for name, there in entry.versions
        if here.get(name) != there
    ]
    return "; ".join(rows) or "others than here"
