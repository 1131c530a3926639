"""Arenas that programs share: one call at a time, the largest one kept, none lost by a failure."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from perfuse import config
from perfuse.runtime.arena import ARENAS, Arena, Arenas
from perfuse.runtime.pool import release_memory
from perfuse.testing import peak_memory
from tests.harness.compare import assert_as_good_as_eager

KIB = 1 << 10


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def live() -> list[Arena]:
    gc.collect()
    return [arena for found in ARENAS._all if (arena := found()) is not None]


@pytest.fixture(autouse=True)
def no_arenas() -> Iterator[None]:
    torch._dynamo.reset()
    release_memory()
    with config.patch({"cpu.tune_matmuls": False}):  # some libraries return memory of their own
        yield
    torch._dynamo.reset()
    release_memory()


def test_an_arena_serves_one_call_at_a_time() -> None:
    arenas = Arenas()
    first = arenas.taken(100 * KIB, empty)
    second = arenas.taken(100 * KIB, empty)
    assert first is not second and not first.take()
    first.leave()
    assert arenas.taken(90 * KIB, empty) is first
    assert not first.take()


def test_a_larger_arena_replaces_a_smaller_one() -> None:
    arenas = Arenas()
    small = arenas.taken(100 * KIB, empty)
    small.leave()
    large = arenas.taken(300 * KIB, empty)
    large.leave()
    assert small.is_outgrown and not large.is_outgrown
    assert arenas.taken(100 * KIB, empty) is large


class Holder:
    """A frame: its windows are views of an arena."""

    def __init__(self, arena: Arena) -> None:
        self.windows = [arena.memory[:8]]
        arena.frames.add(self)


@pytest.mark.parametrize("is_used", [False, True])
def test_an_outgrown_arena_releases_its_memory_unless_a_call_uses_it(is_used: bool) -> None:
    arenas = Arenas()
    small = arenas.taken(100 * KIB, empty)
    frame, memory = Holder(small), weakref.ref(small.memory)
    if not is_used:
        small.leave()
    arenas.taken(300 * KIB, empty)
    assert small.is_outgrown
    assert (memory() is not None) is is_used
    assert len(frame.windows) == is_used


def test_arenas_of_other_magnitudes_are_left_alone() -> None:
    arenas = Arenas()
    small = arenas.taken(100 * KIB, empty)
    small.leave()
    large = arenas.taken(1000 * KIB, empty)
    large.leave()
    assert not small.is_outgrown
    assert arenas.taken(99 * KIB, empty) is small


def chained(number: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A program with a temporary in the arena: the result of a matmul, which another reads."""
    function = (torch.sin, torch.cos, torch.tanh, torch.sigmoid)[number]

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return function(x @ w) @ w

    return fn


def inputs(rows: int = 300) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(128, 128, generator=generator) / 11
    return torch.randn(rows, 128, generator=generator), w


def test_programs_share_one_arena() -> None:
    x, w = inputs()
    functions = [chained(number) for number in range(4)]
    compiled = [torch.compile(fn, backend="perfuse") for fn in functions]
    for call, fn in zip(compiled, functions, strict=True):
        torch.testing.assert_close(call(x, w), fn(x, w))
    assert len(live()) == 1


def test_a_step_keeps_one_arena() -> None:
    layers = [torch.nn.Linear(96, 96), torch.nn.GELU()] * 3
    model = torch.nn.Sequential(*layers)
    compiled = torch.compile(model, backend="perfuse")
    x = torch.randn(700, 96)
    for _ in range(3):
        compiled(x).square().mean().backward()
    assert len(live()) == 1


def test_programs_hold_one_arena_at_a_time() -> None:
    x, w = inputs(rows=600)
    functions = [torch.compile(chained(n), backend="perfuse", dynamic=False) for n in range(2)]

    def both() -> None:
        for fn, rows in zip(functions, (300, 600), strict=True):
            fn(x[:rows], w)

    both()
    release_memory()
    # The arena of the second program, and its result.
    assert peak_memory(both) < (2 * 600 + 64) * 128 * 4


def test_a_call_inside_another_has_an_arena_of_its_own() -> None:
    x, w = inputs()
    inner = torch.compile(chained(3), backend="perfuse")
    inner(x, w)

    @torch.library.custom_op("perfuse_test::nested", mutates_args=())
    def nested(x: Tensor, w: Tensor) -> Tensor:
        return inner(x, w)

    @nested.register_fake
    def _(x: Tensor, w: Tensor) -> Tensor:
        return torch.empty_like(x)

    def outer(x: Tensor, w: Tensor) -> Tensor:
        before = torch.cos(x @ w)
        return (torch.ops.perfuse_test.nested(x, w) + before @ w) @ w + before.sum()

    expected = (chained(3)(x, w) + torch.cos(x @ w) @ w) @ w + torch.cos(x @ w).sum()
    compiled = torch.compile(outer, backend="perfuse")
    for _ in range(3):
        torch.testing.assert_close(compiled(x, w), expected)


def test_a_failed_call_leaves_its_arena() -> None:
    x, w = inputs()

    def looks_up(x: Tensor, w: Tensor, at: Tensor) -> Tensor:
        return torch.sin(x @ w)[at] @ w

    # A size that no temporary has: all of them are in the arena.
    compiled = torch.compile(
        looks_up, backend="perfuse", options={"thresholds.pool_bytes": 1 << 22}
    )
    good, bad = torch.arange(300), torch.full((300,), 300)
    compiled(x, w, good)
    (arena,) = live()
    for _ in range(3):
        with pytest.raises(IndexError):
            compiled(x, w, bad)
    torch.testing.assert_close(compiled(x, w, good), looks_up(x, w, good))
    assert live() == [arena]


def test_threads_do_not_meet_in_an_arena() -> None:
    x, w = inputs()
    functions = [chained(number) for number in range(3)]
    compiled = [torch.compile(fn, backend="perfuse") for fn in functions]
    expected = [call(x, w) for call in compiled]
    wrong: list[int] = []

    def run(number: int) -> None:
        for _ in range(50):
            if not torch.equal(compiled[number](x, w), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(n % 3,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_released_memory_is_gone() -> None:
    x, w = inputs()
    compiled = torch.compile(chained(2), backend="perfuse")
    compiled(x, w)
    assert len(live()) == 1
    release_memory()
    assert live() == []
    torch.testing.assert_close(compiled(x, w), chained(2)(x, w))


def test_large_temporaries_are_apart_where_the_peak_comes_later() -> None:
    """One of 1 MiB is dead when a result of 4 MiB is made; that needs the sum of another."""

    def fn(x: Tensor, w: Tensor, large: Tensor) -> Tensor:
        return large * (torch.sin(x @ w) @ w).sum()

    x, w, large = torch.randn(512, 512), torch.randn(512, 512), torch.randn(1024, 1024)
    compiled = torch.compile(fn, backend="perfuse")
    exact = fn(x.double(), w.double(), large.double())
    assert_as_good_as_eager(compiled(x, w, large), fn(x, w, large), exact)
    release_memory()
    assert peak_memory(lambda: compiled(x, w, large)) < 5.1 * KIB * KIB


def test_large_temporaries_share_an_arena_where_the_peak_is_theirs() -> None:
    x, w = inputs(rows=1024)
    compiled = torch.compile(chained(0), backend="perfuse")
    compiled(x, w)
    assert live()
