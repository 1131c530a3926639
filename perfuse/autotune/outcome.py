"""`Outcome`: how a candidate did: its time, or what went wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from perfuse.decision import OUT_OF_TIME, Refusal


class Fate(StrEnum):
    """The ways in which running a candidate can end."""

    MEASURED = "measured"
    RAISED = "raised"
    CRASHED = "crashed"
    HUNG = "hung"
    OUT_OF_MEMORY = "ran out of memory"
    WRONG = "wrong result"
    MALFORMED = "malformed answer"
    NOT_RUN = "not run"


# Candidates that must not be run again: they would crash a worker or corrupt a user's result.
DANGEROUS = frozenset({Fate.CRASHED, Fate.HUNG, Fate.WRONG})


@dataclass(frozen=True, slots=True)
class Outcome:
    """The value of a request, or why there is none."""

    fate: Fate
    value: Any = None
    detail: str = ""
    is_late: bool = False  # there was no time for it

    @property
    def milliseconds(self) -> float:
        """The measured time; infinity where there is none."""
        return float(self.value) if self.fate is Fate.MEASURED else math.inf

    @property
    def reason(self) -> str:
        """Why there is no time; empty where there is one."""
        if self.fate is Fate.MEASURED:
            return ""
        return f"{self.fate}: {self.detail}" if self.detail else str(self.fate)

    @property
    def refusal(self) -> Refusal:
        """The reason, as a decision keeps it."""
        return Refusal(self.reason, self.is_late, self.fate is Fate.WRONG)


LATE = Outcome(Fate.NOT_RUN, detail=OUT_OF_TIME, is_late=True)


def timed(outcome: Outcome) -> Outcome:
    """An outcome whose value has to be a time: a positive, finite number."""
    value = outcome.value
    is_time = isinstance(value, int | float) and not isinstance(value, bool)
    if outcome.fate is not Fate.MEASURED or (is_time and 0 < value < math.inf):
        return outcome
    return Outcome(Fate.MALFORMED, detail=f"{value!r} is not a time")


def fate_of(error: BaseException) -> Fate:
    """How a candidate ended that raised this."""
    if getattr(error, "is_wrong_result", False):
        return Fate.WRONG
    # PyTorch's allocators raise RuntimeError, with these words in it.
    is_memory = "can't allocate memory" in str(error) or "out of memory" in str(error)
    return Fate.OUT_OF_MEMORY if is_memory or isinstance(error, MemoryError) else Fate.RAISED


def failed(error: BaseException) -> Outcome:
    """The outcome of a candidate that raised this."""
    fate = fate_of(error)
    detail = str(error) if fate is Fate.WRONG else f"{type(error).__name__}: {error}"
    return Outcome(fate, detail=detail, is_late=getattr(error, "is_late", False))
