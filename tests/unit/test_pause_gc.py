"""Collecting garbage pauses for a capture, and afterwards what it made is old."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perfuse import config
from perfuse.capture import pause_gc, trace


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    """As Python starts, whatever a test does and the suite has frozen."""
    gc.unfreeze()
    gc.enable()
    yield
    pause_gc._resume(None)
    gc.unfreeze()
    gc.enable()


def generation_of(thing: object) -> int:
    return next(i for i in range(3) if any(x is thing for x in gc.get_objects(i)))


def test_what_a_capture_makes_is_old_when_collecting_goes_on() -> None:
    pause_gc._pause(None)
    assert not gc.isenabled()
    made: list[object] = [[]]
    assert generation_of(made) == 0
    pause_gc._resume(None)
    assert gc.isenabled()
    assert generation_of(made) == 2
    assert gc.get_freeze_count() == 0


def test_what_the_interpreter_freezes_when_it_starts_does_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    pause_gc._pause(None)
    made: list[object] = [[]]
    pause_gc._resume(None)
    assert generation_of(made) == 2


def test_old_garbage_is_still_collected() -> None:
    class Ring:
        itself: Ring

    pause_gc._pause(None)
    ring = Ring()
    ring.itself = ring
    del ring
    pause_gc._resume(None)
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is Ring]


def test_what_somebody_froze_stays_frozen() -> None:
    made: list[object] = [[]]
    gc.freeze()
    pause_gc._pause(None)
    pause_gc._resume(None)
    assert not any(x is made for x in gc.get_objects()), "it is in no generation"
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    made: list[object] = [[]]
    pause_gc._pause(None)
    pause_gc._resume(None)
    assert not gc.isenabled()
    assert generation_of(made) == 0


def test_the_setting_leaves_it_running() -> None:
    with config.patch(pause_gc=False):
        pause_gc._pause(None)
        assert gc.isenabled()


def test_inside_a_capture_the_pause_lasts_to_its_end() -> None:
    pause_gc._pause(None)
    with pause_gc.paused_gc():
        pass
    assert not gc.isenabled()
    pause_gc._resume(None)
    with pause_gc.paused_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_capture_that_ends_in_another_thread_leaves_no_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Seen(list[bool]):
        """Pauses of a capture that another thread ends just after they were looked at."""

        def __bool__(self) -> bool:
            was_paused = len(self) > 0
            pause_gc._paused = []
            gc.enable()
            return was_paused

    gc.disable()
    monkeypatch.setattr(pause_gc, "_paused", Seen([True]))
    with pause_gc.paused_gc():
        pass
    assert gc.isenabled()


def test_a_backward_is_compiled_without_collecting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_collecting: list[bool] = []
    original = trace.load_or_compile

    def load_or_compile(*args: Any) -> Any:
        is_collecting.append(gc.isenabled())
        return original(*args)

    monkeypatch.setattr(trace, "load_or_compile", load_or_compile)
    with config.patch({"cache.dir": str(tmp_path)}):  # where no run before left the capture
        x = torch.randn(4, requires_grad=True)
        result = torch.compile(lambda x: x.sin().exp(), backend="perfuse")(x)
        assert is_collecting == [False] and gc.isenabled()
        result.sum().backward()
        assert is_collecting == [False, False] and gc.isenabled()
