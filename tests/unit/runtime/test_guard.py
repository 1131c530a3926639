"""Which bytes of a watched arena are poisoned, turn by turn."""

from __future__ import annotations

import torch

from perfuse.codegen.host.source import GuardRow, HostSource
from perfuse.runtime.guard import UNWRITTEN, Guard, GuardLayout


def row(name: str, offset: int, num_bytes: int, first: int, last: int) -> GuardRow:
    return GuardRow(name, offset, num_bytes, "torch.uint8", first, last)


def guard_of(*rows: GuardRow) -> Guard:
    host = HostSource("", 1, 1, 256, (), (), (), 0, (), (), guards=rows)
    return Guard(GuardLayout(host, 1), torch.zeros(256, dtype=torch.uint8))


def test_what_a_turn_reuses_is_neither_poisoned_before_nor_after_it() -> None:
    """On a GPU a turn is many kernels: one may write where another has read for the last time."""
    old, new = row("old", 0, 64, 0, 1), row("new", 32, 96, 1, 2)
    guard = guard_of(old, new)
    guard.before(0)
    guard.arena[0:64] = 7
    guard.after(0, "k0")
    guard.before(1)
    assert bool((guard.arena[0:64] == 7).all()), "the first kernel has still to read it"
    guard.arena[32:128] = 8
    guard.after(1, "k1, k2")
    assert bool((guard.arena[32:128] == 8).all()), "a later turn has still to read it"
    assert bool((guard.arena[0:32] == UNWRITTEN).all())
    guard.before(2)
    guard.after(2, "k3")
    assert bool((guard.arena == UNWRITTEN).all())
