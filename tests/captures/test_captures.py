"""Caches hold nothing but the truth: a sample of `tests.captures.run`, and faults that it finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perfuse
from perfuse.graph import canonical
from perfuse.torch_compat.guards import SymbolTable
from tests.captures.check import check_program
from tests.captures.run import run_process

SAMPLE = (12, 3)  # the first seed, and how many


def test_values_are_those_of_the_call_and_of_the_process(tmp_path: Path) -> None:
    for process in (0, 1):
        outcomes = run_process(*SAMPLE, process, tmp_path)
        wrong = [o["text"] for o in outcomes if o["status"] in ("wrong", "error")]
        assert not wrong, "\n".join(wrong)
        assert sum(o["status"] == "pass" for o in outcomes) >= 2


def _guards_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SymbolTable, "guards_since", lambda self, mark: [])


def _guards_are_not_set_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SymbolTable, "set_guards", lambda self, spelled: True)


def _floats_are_not_in_the_key(patch: pytest.MonkeyPatch) -> None:
    plain: Callable[..., str] = canonical.spell

    def spell(value: Any, numbers: Any) -> str:
        return "float" if type(value) is float else plain(value, numbers)

    patch.setattr(canonical, "spell", spell)


# A fault of the cache, and the runs (a seed and a process, one after another) that show it.
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[tuple[int, int], ...]]] = {
    "guards are not kept": (_guards_are_not_kept, ((20, 0),)),
    "guards are not set again": (_guards_are_not_set_again, ((20, 0), (20, 0))),
    "floats are not in the key": (_floats_are_not_in_the_key, ((1, 0),)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_cache_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, runs = FAULTS[name]
    with perfuse.testing.fresh_cache():
        with monkeypatch.context() as patch:
            inject(patch)
            found = [check_program(*run) for run in runs]
        assert found[-1].status == "wrong"
        assert "right without the cache" in found[-1].text or name.startswith("floats")
    with perfuse.testing.fresh_cache():
        assert {check_program(*run).status for run in runs} == {"pass"}
