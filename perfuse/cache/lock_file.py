"""The lock file: choices pinned in a text that people read, compare, merge and commit.

An entry says what was decided, for which kind of device and which versions, and nothing that
changes from one measurement to the next. A file that cannot be read completely is an error: a user
who pins choices wants no others.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perfuse.cache.folders import new_name
from perfuse.decision import Choice, Decision, Question
from perfuse.errors import MALFORMED, LockFileError
from perfuse.system import CREATE, opened, read_all, system, write_all

SCHEMA = 1
MOST_BYTES = 64 << 20
# Without O_NOFOLLOW: the file is text that the user names, not code. FIFOs are refused.
READ = os.O_RDONLY | os.O_NONBLOCK
CONFLICT = re.compile(r"^(<{7}|={7}|>{7}|\|{7})( .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Pinned:
    """One entry: a problem, where its answer holds, and the answer."""

    kind: str
    problem: str
    device: str
    versions: tuple[tuple[str, str], ...]
    candidates: tuple[str, ...]  # as text: they show what the choice was made among
    chosen: Choice

    @property
    def name(self) -> str:
        """The name of the entry, by which others are compared and merged with it."""
        asked = repr((self.kind, self.problem, self.device, sorted(self.versions)))
        return f"{self.kind} {hashlib.sha256(asked.encode()).hexdigest()[:24]}"

    def chosen_of(self, candidates: Iterable[Choice]) -> Choice | None:
        """The one of these candidates that is pinned, if it is among them."""
        same = (c for c in candidates if _shown(c) == _shown(self.chosen))
        return next((c for c in same if dict(c.options) == dict(self.chosen.options)), None)

    def to_json(self) -> dict[str, Any]:
        chosen = self.chosen
        return {
            "candidates": list(self.candidates),
            "chosen": {
                "name": chosen.name,
                "options": dict(chosen.options),
                "source": chosen.source,
            },
            "device": self.device,
            "kind": self.kind,
            "problem": self.problem,
            "versions": dict(self.versions),
        }


@dataclass(frozen=True, slots=True)
class LockFile:
    """All entries by name."""

    entries: Mapping[str, Pinned]

    def of_problem(self, question: Question) -> list[Pinned]:
        """The entries of this problem, on whatever device."""
        asked = (question.kind, question.problem)
        return [e for e in self.entries.values() if (e.kind, e.problem) == asked]

    def text(self) -> str:
        """The file: sorted, one line per field, the same bytes for the same entries."""
        entries = {name: entry.to_json() for name, entry in self.entries.items()}
        document = {"decisions": entries, "schema": SCHEMA}
        return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def pinned_of(decision: Decision) -> Pinned | None:
    """The entry of a decision; None for one that holds only for its program, or for nothing."""
    question = decision.question
    if question is None or decision.is_open or not decision.is_final:
        return None
    return Pinned(
        kind=question.kind,
        problem=question.problem,
        device=question.device,
        versions=tuple(sorted(question.versions)),
        candidates=tuple(map(_shown, question.candidates)),
        chosen=replace(decision.chosen, options=tuple(sorted(decision.chosen.options))),
    )


def lock_of(decisions: Iterable[Decision]) -> LockFile:
    """The lock file of these decisions."""
    found = [entry for d in decisions if (entry := pinned_of(d)) is not None]
    return LockFile({entry.name: entry for entry in found})


def read_lock(path: str) -> LockFile | None:
    """The lock file at this path, None if there is none; LockFileError if it cannot be used."""
    try:
        data = _bytes(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LockFileError(f"the lock file cannot be read: {error.strerror}", at=path) from error
    return _parsed(data, path)


def write_lock_file(path: str, lock: LockFile) -> None:
    """Write a lock file in place of the one there: completely or not at all."""
    target = Path(os.path.realpath(os.path.expanduser(path)))
    aside = target.with_name(new_name())
    try:
        with opened(aside, CREATE, 0o666) as fd:  # less the user's umask: it is to be shared
            write_all(fd, lock.text().encode())
            system().fsync(fd)
        system().rename(aside, target)
    except OSError as error:
        raise LockFileError(f"the lock file cannot be written: {error}", at=path) from error
    finally:
        if aside.exists():
            system().unlink(aside)


def lock_digest(path: str) -> str:
    """The hash of what a lock file pins: a program compiled under another one is not reused."""
    lock = read_lock(path) if path else None
    return "" if lock is None else hashlib.sha256(lock.text().encode()).hexdigest()


def _bytes(path: str) -> bytes:
    with opened(os.path.expanduser(path), READ) as fd:
        status = system().fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            message = f"it is not a regular file of at most {MOST_BYTES >> 20} MiB"
            raise LockFileError(f"the lock file cannot be read: {message}", at=path)
        return read_all(fd)


@functools.lru_cache(8)
def _parsed(data: bytes, path: str) -> LockFile:
    try:
        text = data.decode()
        _refuse_conflicts(text, path)
        document = json.loads(text, object_pairs_hook=_without_duplicates)
        if document["schema"] != SCHEMA:
            message = (
                f"its schema is {document['schema']!r:.20}, this version of Perfuse reads {SCHEMA}"
            )
            raise LockFileError(f"the lock file cannot be used: {message}", at=path)
        rows: Mapping[str, Any] = document["decisions"]
        return LockFile({name: _entry(name, row, path) for name, row in rows.items()})
    except MALFORMED as error:
        message = f"the lock file is damaged: {type(error).__name__}: {error}"
        raise LockFileError(message, at=path) from error


def _refuse_conflicts(text: str, path: str) -> None:
    found = CONFLICT.search(text)
    if found is not None:
        line = text.count("\n", 0, found.start()) + 1
        raise LockFileError(
            f"the lock file has merge-conflict markers, the first in line {line}",
            at=path,
            hint="keep one side of each conflict, or write the file again: perfuse lock write.",
        )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of two entries of one name, as a merge may leave them, neither is right."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} appears twice")
    return made


def _entry(name: str, row: Mapping[str, Any], path: str) -> Pinned:
    chosen = row["chosen"]
    entry = Pinned(
        kind=row["kind"],
        problem=row["problem"],
        device=row["device"],
        versions=tuple(sorted(row["versions"].items())),
        candidates=tuple(row["candidates"]),
        chosen=Choice.from_json({**chosen, "options": list(chosen["options"].items())}),
    )
    if not all(isinstance(text, str) for text in (entry.problem, *entry.candidates)):
        raise TypeError(f"{name!r} has a value that is not text")
    if entry.name != name:
        message = f"{name!r} does not match its fields"
        raise LockFileError(f"the lock file is damaged or was edited: {message}", at=path)
    if _shown(entry.chosen) not in entry.candidates:
        message = (
            f"{name!r} has the choice {_shown(entry.chosen)!r}, which is not one of its candidates"
        )
        raise LockFileError(f"the lock file cannot be used: {message}", at=path)
    return entry


def _shown(choice: Choice) -> str:
    return f"{choice.source} {choice.name}"
