"""The quarantine: candidates that crashed, hung or were wrong are not tried again."""

from __future__ import annotations

import json
from typing import Any

import torch

from perfuse.cache import keys
from perfuse.cache.access import open_store
from perfuse.cache.keys import key_of
from perfuse.context import Context
from perfuse.decision import Choice
from perfuse.errors import MALFORMED, CacheDamaged
from perfuse.logs import channel

FILE = "quarantined.json"


def _key(problem: Any, choice: Choice, context: Context) -> str:
    """It has no settings: they decide whether a candidate is proposed, not what it does."""
    machine = (torch.__version__, context.target)
    return key_of(keys.QUARANTINE, *machine, repr(problem), choice)


def quarantine(problem: Any, choice: Choice, reason: str, context: Context) -> None:
    """Record that a candidate for a problem must not be run, and report it."""
    context.counters.inc("autotune.quarantined")
    channel("tuning").warning("%s for %s is quarantined: %s", choice, problem, reason)
    document = {"problem": str(problem), "choice": str(choice), "reason": reason}
    key = _key(problem, choice, context)
    open_store(context).put(key, {FILE: json.dumps(document, indent=1).encode()})


def quarantined(problem: Any, choice: Choice, context: Context) -> str | None:
    """Why a candidate must not be run; None if it may be."""
    if not context.settings.cache.enabled:
        return None
    entry = open_store(context).get(_key(problem, choice, context))
    if entry is None:
        return None
    try:
        return f"quarantined: {entry.read_json(FILE)['reason']}"
    except (CacheDamaged, *MALFORMED):
        return None
