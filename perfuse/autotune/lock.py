"""Writing and checking lock files: decisions in, pinned choices out, and what fits where."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from perfuse.autotune.device_kind import current_versions, device_kind
from perfuse.cache.access import open_store
from perfuse.cache.decisions import stored_decisions
from perfuse.cache.lock_file import LockFile, Pinned, lock_of, read_lock, write_lock_file
from perfuse.config import Settings, snapshot
from perfuse.context import Context
from perfuse.decision import Decision
from perfuse.errors import LockFileError
from perfuse.gpu import gpu_of_device
from perfuse.target import Target, gpu_target, host_target, target_of

DEFAULT_PATH = "perfuse.lock"
ELSEWHERE = "for another kind of device"


class Explained(Protocol):
    """The result of `perfuse.explain`."""

    @property
    def graphs(self) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """One entry of a lock file, and why it does not fit, if it does not."""

    entry: Pinned
    problem: str = ""

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is for another kind of device: a file may serve several."""
        return self.problem == ELSEWHERE


def write_lock(
    path: str = DEFAULT_PATH, *explained: Explained, keeps_others: bool = True
) -> LockFile:
    """Pin the choices of explained functions, or else all that this machine remembers.

    Entries that are in the file already stay, unless they are decided differently now or
    `keeps_others` is off. Returns the file as written.
    """
    decisions = [d for e in explained for graph in e.graphs for d in graph.decisions]
    return pin_decisions(path, decisions if explained else _remembered(), keeps_others=keeps_others)


def pin_decisions(
    path: str, decisions: Iterable[Decision], *, keeps_others: bool = True
) -> LockFile:
    """Pin the choices of decisions in a lock file; the file as written."""
    made = lock_of(decisions)
    earlier = read_lock(path) if keeps_others else None
    entries = {**({} if earlier is None else earlier.entries), **made.entries}
    lock = LockFile(entries)
    write_lock_file(path, lock)
    return lock


def check_lock(path: str = DEFAULT_PATH, target: str | None = None) -> list[Verdict]:
    """Each entry, and whether it fits this machine, or a target such as "cuda:90"."""
    lock = read_lock(path)
    if lock is None:
        raise LockFileError("there is no lock file", at=path)
    settings = snapshot()
    targets = _targets_here(settings) if target is None else [target_of(target, settings)]
    return [Verdict(entry, _misfit(entry, targets)) for entry in lock.entries.values()]


def _remembered() -> Iterable[Decision]:
    """The decisions in the local store that hold on this machine, as it is now."""
    targets = _targets_here(snapshot())
    for decision in stored_decisions(open_store(Context.default())):
        lock = lock_of([decision])
        if not any(_misfit(entry, targets) for entry in lock.entries.values()):
            yield decision


def _targets_here(settings: Settings) -> list[Target]:
    gpus = {gpu_of_device(k) for k in range(torch.cuda.device_count())}
    return [host_target(settings), *(gpu_target(settings, gpu) for gpu in gpus)]


def _misfit(entry: Pinned, targets: Sequence[Target]) -> str:
    """Why an entry fits none of these targets; empty if it fits one."""
    here = [target for target in targets if device_kind(target) == entry.device]
    if not here:
        return ELSEWHERE
    versions = current_versions(here[0])
    rows = [(name, there, versions.get(name, "none")) for name, there in entry.versions]
    return "; ".join(f"for {n} {there}, not {now}" for n, there, now in rows if there != now)
