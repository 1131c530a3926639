"""Lock files: written alike, read whole or not at all, and never a choice that does not fit."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfuse.autotune.lock import check_lock, write_lock
from perfuse.autotune.matmuls import CpuMatmul, decide
from perfuse.autotune.stored import stored_or_measured
from perfuse.cache.lock_file import lock_digest, lock_of, read_lock, write_lock_file
from perfuse.config import patch
from perfuse.context import Context
from perfuse.decision import Choice, Decision, Question, library, ranked, undecided
from perfuse.errors import LockFileError, LockFileWarning
from perfuse.system import replaced
from tests.harness.faults import Double, Fault
from tests.unit.autotune.questions import FIRST, SECOND, TILED, context, decision, question

ASKED = question()
OTHER_DEVICE = question(device="another device")


def written(path: Path, *decisions: Decision) -> str:
    write_lock_file(str(path), lock_of(decisions))
    return str(path)


def decided(ctx: Context, asked: Question = ASKED, chosen: Choice = FIRST) -> Decision:
    """The decision where a race would take another choice than the one that is pinned."""
    return stored_or_measured(
        asked, "here", ctx, lambda: decision(asked, chosen), "autotune.measured"
    )


def test_the_text_is_sorted_with_one_line_a_field(tmp_path: Path) -> None:
    path = written(tmp_path / "perfuse.lock", decision(ASKED))
    name = next(iter(lock_of([decision(ASKED)]).entries))
    assert (
        Path(path).read_text()
        == f"""{{
 "decisions": {{
  "{name}": {{
   "candidates": [
    "library aten.mm.out",
    "library mkldnn._linear_pointwise.default",
    "tile rows 4x64"
   ],
   "chosen": {{
    "name": "mkldnn._linear_pointwise.default",
    "options": {{}},
    "source": "library"
   }},
   "device": "a device",
   "kind": "matmul",
   "problem": "a problem",
   "versions": {{
    "onednn": "3.1",
    "torch": "2.13"
   }}
  }}
 }},
 "schema": 1
}}
"""
    )


def test_the_same_decisions_give_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    rows = [decision(question(f"problem {k}")) for k in range(20)]
    faster = [replace(d, rivals=(), reason="measured again") for d in reversed(rows)]
    first, second = (written(tmp_path / n, *d) for n, d in (("a", rows), ("b", faster)))
    assert Path(first).read_bytes() == Path(second).read_bytes()
    assert lock_digest(first) == lock_digest(second) != ""


def test_what_is_written_is_read(tmp_path: Path) -> None:
    lock = lock_of([decision(ASKED, TILED), decision(OTHER_DEVICE)])
    write_lock_file(str(tmp_path / "a"), lock)
    assert read_lock(str(tmp_path / "a")) == lock
    assert not stat.S_IMODE((tmp_path / "a").stat().st_mode) & stat.S_IXUSR
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_decisions_that_hold_for_nothing_else_are_left_out() -> None:
    own = replace(decision(ASKED), question=None)
    assert not lock_of([own, undecided("a", ASKED)]).entries
    assert lock_of([ranked("a", ASKED, (TILED, FIRST))]).entries, "a model's choice can be shipped"


@pytest.mark.parametrize("chosen", [FIRST, SECOND, TILED], ids=str)
def test_a_pinned_choice_is_replayed_without_measuring(tmp_path: Path, chosen: Choice) -> None:
    path = written(tmp_path / "perfuse.lock", decision(ASKED, chosen))
    ctx = context(tmp_path / "cache", lock_file=path)
    other = next(c for c in ASKED.candidates if c != chosen)
    decided(context(tmp_path / "cache"), chosen=other)  # what this machine has measured
    found = decided(ctx, chosen=other)
    assert found.chosen == chosen and found.subject == "here" and path in found.reason
    counts = ctx.counters.snapshot()
    assert counts == {"autotune.cache_hit": 1, "autotune.lock_hit": 1}


def test_another_list_of_candidates_keeps_a_choice_that_is_among_them(tmp_path: Path) -> None:
    path = written(tmp_path / "perfuse.lock", decision(ASKED))
    wider = question(candidates=(FIRST, library("aten.new"), SECOND), rules="others")
    assert decided(context(tmp_path, lock_file=path), wider).chosen == SECOND


UNFIT = {
    "another kind of device .a device., not for x": {"device": "x"},
    "other versions .torch 2.13, here 3.0": {"versions": (("onednn", "3.1"), ("torch", "3.0"))},
    "other versions .onednn 3.1, here none": {"versions": (("torch", "2.13"),)},
    "which is not a candidate here": {"candidates": (FIRST, TILED)},
    "has no choice for some problems": {"problem": "another problem"},
}


@pytest.mark.parametrize("told", UNFIT)
def test_what_does_not_fit_is_reported_and_measured(tmp_path: Path, told: str) -> None:
    path = written(tmp_path / "perfuse.lock", decision(ASKED))
    ctx = context(tmp_path, lock_file=path)
    with pytest.warns(LockFileWarning, match=told):
        assert decided(ctx, question(**UNFIT[told])).chosen == FIRST
    assert ctx.counters["autotune.measured"] == 1
    assert ctx.counters["autotune.lock_missing"] + ctx.counters["autotune.lock_unfit"] == 1


def test_options_are_part_of_a_choice(tmp_path: Path) -> None:
    path = written(tmp_path / "perfuse.lock", decision(ASKED, TILED))
    other = replace(TILED, options=(("rows", 8), ("columns", 64), ("streams", True)))
    with pytest.warns(LockFileWarning, match="not a candidate"):
        decided(context(tmp_path, lock_file=path), question(candidates=(FIRST, other)))


def test_a_file_that_is_not_there_is_reported(tmp_path: Path) -> None:
    ctx = context(tmp_path, lock_file=str(tmp_path / "none.lock"))
    with pytest.warns(LockFileWarning, match="does not exist"):
        assert decided(ctx).chosen == FIRST


def edited(**changes: Any) -> Callable[[str], str]:
    def edit(text: str) -> str:
        document = json.loads(text)
        for row in document["decisions"].values():
            row |= changes
        return json.dumps(document)

    return edit


def conflicting(text: str) -> str:
    return text.replace(
        '    "name"', '<<<<<<< ours\n    "name": "a"\n=======\n    "name"', 1
    ).replace('   "device"', '>>>>>>> theirs\n   "device"', 1)


DAMAGES: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda text: "", "damaged"),
    "half": (lambda text: text[: len(text) // 2], "damaged"),
    "a list": (lambda text: "[]", "damaged"),
    "nested": (lambda text: "[" * 100_000, "damaged"),
    "no schema": (lambda text: '{"decisions": {}}', "damaged"),
    "a newer schema": (lambda text: text.replace('"schema": 1', '"schema": 2'), "its schema is 2"),
    "a conflict": (conflicting, "merge-conflict markers, the first in line 10"),
    "another problem": (edited(problem="another"), "does not match its fields"),
    "another device": (edited(device="another"), "does not match its fields"),
    "a number for a text": (edited(problem=3), "damaged"),
    "no versions": (edited(versions=None), "damaged"),
    "a choice that is none": (edited(chosen={"source": "library"}), "damaged"),
    "an unknown choice": (
        edited(chosen={"source": "library", "name": "aten.no", "options": {}}),
        "not one of its candidates",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_an_error(tmp_path: Path, damage: str) -> None:
    change, told = DAMAGES[damage]
    path = tmp_path / "perfuse.lock"
    written(path, decision(ASKED))
    path.write_text(change(path.read_text()))
    for use in (read_lock, lock_digest, check_lock, write_lock):
        with pytest.raises(LockFileError, match=told) as raised:
            use(str(path))
        assert str(path) in str(raised.value)
    with pytest.raises(LockFileError):
        decided(context(tmp_path, lock_file=str(path)))


def test_one_entry_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "perfuse.lock"
    text = Path(written(path, decision(ASKED))).read_text()
    entry = text.partition('"decisions": {')[2].rpartition('\n },\n "schema"')[0]
    path.write_text(text.replace(entry, f"{entry},{entry}"))
    with pytest.raises(LockFileError, match="appears twice"):
        read_lock(str(path))


def test_bytes_that_are_no_text_and_things_that_are_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xfe{}")
    (tmp_path / "folder").mkdir()
    for name in ("a", "folder"):
        with pytest.raises(LockFileError):
            read_lock(str(tmp_path / name))


def test_a_choice_may_be_edited_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "perfuse.lock"
    written(path, decision(ASKED))
    other = {"source": "library", "name": "aten.mm.out", "options": {}}
    path.write_text(edited(chosen=other)(path.read_text()))
    assert decided(context(tmp_path, lock_file=str(path)), chosen=SECOND).chosen == FIRST


def _full(double: Double, real: Any, args: tuple[Any, ...]) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("operation", ["write", "fsync", "rename", "open"])
def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, operation: str) -> None:
    path = tmp_path / "perfuse.lock"
    before = Path(written(path, decision(ASKED))).read_bytes()

    class Full(Double):
        pass

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _full(self, None, args)

    setattr(Full, operation, fail)
    with replaced(Full(Fault("full", _full))), pytest.raises(LockFileError, match="No space"):
        write_lock_file(str(path), lock_of([decision(OTHER_DEVICE)]))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_writing_keeps_the_entries_of_others(tmp_path: Path) -> None:
    path = written(tmp_path / "perfuse.lock", decision(OTHER_DEVICE))
    problem = CpuMatmul(8, 8, 8, (8, 1), (8, 1), has_bias=False)
    with patch({"cache.dir": str(tmp_path / "cache")}):
        made = decide(problem, Context.default())
        kept = write_lock(path)
        verdicts = {v.entry.device: v for v in check_lock(path)}
        assert len(kept.entries) == 2 and verdicts["another device"].is_elsewhere
        assert made.question is not None and verdicts[made.question.device].fits
        assert len(write_lock(path, keeps_others=False).entries) == 1
