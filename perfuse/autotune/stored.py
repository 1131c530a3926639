"""Decisions on disk: measured once, found by every later compile on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable

from perfuse.cache.access import open_store
from perfuse.cache.store import Store
from perfuse.context import Context
from perfuse.decision import Choice, Decision
from perfuse.errors import MALFORMED, CacheDamaged
from perfuse.logs import channel

FILE = "decision.json"


def stored_or_measured(
    key: str,
    context: Context,
    check: Callable[[Choice], object],
    measure: Callable[[], Decision],
    counter: str,
) -> Decision:
    """The decision under this key, or a new one, which is stored and counted.

    What cannot be read, is of another format, or whose choice fails `check`, is measured again.
    """
    store = open_store(context)
    found = _stored(store, key, check) if context.settings.cache.enabled else None
    if found is not None:
        context.counters.inc("autotune.cache_hit")
        return found
    decision = measure()
    context.counters.inc(counter)
    channel("tuning").info("%s (%s)", decision, decision.reason)
    store.put(key, {FILE: json.dumps(decision.to_json(), indent=1).encode()})
    return decision


def _stored(store: Store, key: str, check: Callable[[Choice], object]) -> Decision | None:
    entry = store.get(key)
    if entry is None:
        return None
    try:
        decision = Decision.from_json(entry.read_json(FILE))
        check(decision.chosen)
        return decision
    except (CacheDamaged, *MALFORMED):
        store.discard(key)
        return None
