"""Questions, choices and decisions: how an operation is computed, and the measurements behind it.

Plain data that goes to JSON and back: stores keep decisions, compiled programs carry them, reports
show them, and a lock file pins them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

FORMAT = 1  # of the JSON; a decision of another one is measured again
Plain = str | int | float | bool | None


FUSED = "is_fused"  # the option of a choice that says whether an epilogue belongs to it


@dataclass(frozen=True, slots=True)
class Choice:
    """One implementation of an operation: a library call, a template or a tile, with parameters."""

    source: str  # who implements it: "library", "triton", "cpp", "ck", "tile"
    name: str
    options: tuple[tuple[str, Plain], ...] = ()

    @staticmethod
    def from_json(document: dict[str, Any]) -> Choice:
        options = tuple((_text(name), _plain(value)) for name, value in document["options"])
        return Choice(_text(document["source"]), _text(document["name"]), options)

    def __str__(self) -> str:
        return self.name


def library(op: str) -> Choice:
    """The choice of a library call: aten.mm.out."""
    return Choice("library", op)


@dataclass(frozen=True, slots=True)
class Question:
    """The problem that a decision solves, its candidates, and where the answer holds.

    Nothing in it depends on names of files, graphs or buffers, nor on the code of Perfuse.
    """

    kind: str  # the name of its kind in the store (`cache/keys.py`): matmul, template, tile
    problem: str  # one line that identifies it, together with the kind
    candidates: tuple[Choice, ...]  # the default first
    device: str  # the kind of device that it is asked for
    versions: tuple[tuple[str, str], ...]  # of the software that the candidates consist of
    rules: str = ""  # how candidates are compared

    @staticmethod
    def from_json(document: dict[str, Any]) -> Question:
        candidates = tuple(map(Choice.from_json, document["candidates"]))
        versions = tuple((_text(name), _text(value)) for name, value in document["versions"])
        texts = {name: _text(document[name]) for name in ("kind", "problem", "device", "rules")}
        return Question(candidates=candidates, versions=versions, **texts)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a choice has no time."""

    text: str
    is_late: bool = False  # there was no time to measure it
    is_wrong: bool = False  # its result was


@dataclass(frozen=True, slots=True)
class Rival:
    """A choice that was considered: measured, or refused for a reason."""

    choice: Choice
    best_us: float | None = None
    median_us: float | None = None
    spread_us: float | None = None  # the median distance from the median
    refusal: str = ""
    is_late: bool = False
    is_wrong: bool = False

    @staticmethod
    def refused(choice: Choice, refusal: Refusal) -> Rival:
        flags = {"is_late": refusal.is_late, "is_wrong": refusal.is_wrong}
        return Rival(choice, refusal=refusal.text, **flags)

    def measured(self) -> str:
        if self.median_us is None:
            return f"refused: {self.refusal}"
        return f"{self.median_us:,.1f} us, spread {self.spread_us:,.1f}"


NOTHING_REMEMBERED = "no choice is remembered, and nothing is measured in this mode"
OUT_OF_TIME = "the time limit for tuning was reached"
LATE = Refusal(OUT_OF_TIME, is_late=True)


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice made by measurement, with every rival, the default first."""

    subject: str  # what was decided on: matmul 64x256x256, kernel k3
    chosen: Choice
    rivals: tuple[Rival, ...]
    reason: str
    question: Question | None = None  # for what else it holds; None: for this program alone
    # False: candidates cannot be built here; once that is fixed, it is decided again.
    is_complete: bool = True

    @property
    def is_open(self) -> bool:
        """Whether the default was taken only because nothing is remembered or measured."""
        return self.reason in (NOTHING_REMEMBERED, OUT_OF_TIME)

    @property
    def is_final(self) -> bool:
        """Whether it is remembered: all candidates could be built, and there was time for them."""
        return self.is_complete and not any(rival.is_late for rival in self.rivals)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_json(document: dict[str, Any]) -> Decision:
        """The decision again; one of `errors.MALFORMED` where it is another format or damaged."""
        if document["format"] != FORMAT:
            raise ValueError(f"a decision of format {document['format']!r}, not {FORMAT}")
        rivals = tuple(
            Rival(**{**row, "choice": Choice.from_json(row["choice"])})
            for row in document["rivals"]
        )
        chosen = Choice.from_json(document["chosen"])
        asked = document.get("question")
        question = None if asked is None else Question.from_json(asked)
        texts = _text(document["subject"]), _text(document["reason"])
        is_complete = bool(document.get("is_complete", True))
        decision = Decision(texts[0], chosen, rivals, texts[1], question, is_complete)
        str(decision)  # which raises where times are not numbers
        return decision

    def __str__(self) -> str:
        rivals = "; ".join(f"{r.choice} {r.measured()}" for r in self.rivals)
        return f"{self.subject}: {self.chosen} of {rivals}"


def identified(summary: str, text: str) -> str:
    """A problem in one line: what a reader wants to know, and the hash of what identifies it."""
    return f"{summary}, {hashlib.sha256(text.encode()).hexdigest()[:32]}"


def answer_from(document: dict[str, Any], question: Question) -> Decision:
    """A decision on this very question; one of `errors.MALFORMED` where it is not one."""
    decision = Decision.from_json(document)
    if decision.question != question:
        raise ValueError("a decision on another question")
    if decision.chosen not in question.candidates:
        raise ValueError(f"{decision.chosen} is not a candidate")
    return decision


def undecided(subject: str, question: Question, reason: str = NOTHING_REMEMBERED) -> Decision:
    """The default, where nothing is remembered and nothing may be measured."""
    rivals = unmeasured(question.candidates)
    return Decision(subject, question.candidates[0], rivals, reason, question)


def ranked(subject: str, question: Question, order: Sequence[Choice]) -> Decision:
    """A decision by a model only, for a device you do not have; the best choice first."""
    reason = "ranked by a model, not measured"
    return Decision(subject, order[0], unmeasured(order), reason, question)


def unremembered(decision: Decision) -> Decision:
    """The decision, for this program only: candidates could not be built here."""
    reason = f"{decision.reason}; not remembered, since candidates cannot be built here"
    return replace(decision, reason=reason, is_complete=False)


def unmeasured(choices: Sequence[Choice]) -> tuple[Rival, ...]:
    """Rivals of a decision that was not made by measurement here."""
    return tuple(Rival(choice, refusal="not measured here") for choice in choices)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, not {value!r:.80}")
    return value


def _plain(value: Any) -> Plain:
    if not isinstance(value, Plain):
        raise TypeError(f"expected a number, text or nothing, not {value!r:.80}")
    return value
