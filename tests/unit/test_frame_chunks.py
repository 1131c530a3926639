"""The interpreter's frame memory is kept while something is captured, and only then."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfuse import config
from perfuse.capture import frame_chunks
from perfuse.capture.frame_chunks import Keeper, build_keeper, find_keeper
from perfuse.context import Context
from perfuse.testing import fresh_cache
from tests.behaviour.scripts import finish, start

GET = ctypes.pythonapi.PyObject_GetArenaAllocator
SET = ctypes.pythonapi.PyObject_SetArenaAllocator
Arena = ctypes.c_void_p * 3  # context, take, give


def arena() -> list[int | None]:
    current = Arena()
    GET(current)
    return list(current)


@pytest.fixture
def before() -> Iterator[list[int | None]]:
    """The allocator before the test, and again after it."""
    found = arena()
    yield found
    SET(Arena(*found))


@pytest.fixture
def keeper(before: list[int | None]) -> Iterator[Keeper]:
    with fresh_cache():
        context = Context.default()
        assert find_keeper(context) is None
        build_keeper(context)
        found = find_keeper(context)
        assert found is not None
        yield found
        found.release()


def leaf() -> int:
    return 1


def call_at_every_depth(depth: int) -> int:
    """Some of these calls cross the end of a chunk, whatever lies below."""
    here = sum(leaf() for _ in range(3))
    return here + (call_at_every_depth(depth - 1) if depth else 0)


def test_blocks_are_used_again_until_they_are_released(keeper: Keeper) -> None:
    num_before = keeper.release()
    assert call_at_every_depth(300) == 903
    assert keeper.release() == num_before
    assert keeper.keep()
    assert call_at_every_depth(300) == 903
    num_kept = keeper.release()
    assert num_kept > num_before
    assert call_at_every_depth(300) == 903
    assert keeper.release() == num_kept


def test_what_was_there_comes_back(keeper: Keeper, before: list[int | None]) -> None:
    assert keeper.keep()
    assert keeper.keep()
    assert arena() != before
    keeper.release()
    assert arena() == before


def test_another_allocator_is_left_alone(keeper: Keeper, before: list[int | None]) -> None:
    assert keeper.keep()
    keeper.release()
    theirs = [4096, *before[1:]]
    SET(Arena(*theirs))
    assert not keeper.keep()
    keeper.release()
    assert arena() == theirs


def test_another_allocator_on_top_stays(keeper: Keeper) -> None:
    assert keeper.keep()
    on_top = [4096, *arena()[1:]]  # it calls ours
    SET(Arena(*on_top))
    keeper.release()
    assert arena() == on_top
    assert not keeper.keep()
    assert call_at_every_depth(300) == 903


def test_only_where_the_settings_say_so(before: list[int | None]) -> None:
    with fresh_cache():
        for off in ({"keep_frame_chunks": False}, {"cache.enabled": False}):
            with config.patch(off):
                build_keeper(Context.default())
                assert find_keeper(Context.default()) is None
        assert find_keeper(Context.default()) is None


def test_a_compiler_that_fails_is_counted_and_nothing_else(tmp_path: Path) -> None:
    failing = tmp_path / "compiler"
    failing.write_text("#!/bin/sh\ntest $1 = --version\n")
    failing.chmod(0o700)
    with fresh_cache(), config.patch({"cpu.compiler": str(failing)}):
        context = Context.default()
        num_before = context.counters["frame_chunks.not_built"]
        build_keeper(context)
        assert context.counters["frame_chunks.not_built"] == num_before + 1
        assert find_keeper(context) is None


# In a process of its own: what others captured before would have a say.
CAPTURES = """
import ctypes, json, sys
import torch
from perfuse import config
from perfuse.capture.frame_chunks import find_keeper
from perfuse.context import Context

def arena():
    current = (ctypes.c_void_p * 3)()
    ctypes.pythonapi.PyObject_GetArenaAllocator(current)
    return list(current)

def look(module, inputs):
    seen.append(arena())
    return module.forward

seen, before = [], arena()
with torch.no_grad():
    torch.compile(lambda x: x.sin() + 1, backend="perfuse")(torch.ones(3))
    is_stored = find_keeper(Context.default()) is not None
    torch.compile(lambda x: x.cos(), backend=look)(torch.ones(3))
    with config.patch(keep_frame_chunks=False):
        torch.compile(lambda x: x.tan(), backend=look)(torch.ones(3))
used, unused = (one != before for one in seen)
is_left = arena() != before
print(json.dumps({"is_stored": is_stored, "used": used, "unused": unused, "left": is_left}))
"""


def test_a_stored_capture_brings_it_and_the_next_capture_uses_it(tmp_path: Path) -> None:
    found = finish(start(CAPTURES, tmp_path))
    assert found == {"is_stored": True, "used": True, "unused": False, "left": False}


def test_wrong_settings_are_not_told_by_a_capture(before: list[int | None]) -> None:
    found: list[Keeper] = []
    with config.patch({"cpu.compiler": "false"}):
        frame_chunks._keep(found, None)
    assert not found and arena() == before
