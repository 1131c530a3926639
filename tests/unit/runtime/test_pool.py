"""Pooled memory: blocks come back with their last view, and no tensor loses its memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from perfuse import config
from perfuse.runtime import pool
from perfuse.runtime.pool import POOL, Pool, empty_strided, pooled
from perfuse.schedule.memory import SMALLEST_POOLED

MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    POOL.clear()
    yield
    POOL.clear()


def large(num_bytes: int = MIB) -> torch.Tensor:
    return empty_strided((num_bytes // 4,), (1,))


def test_block_comes_back_and_is_used_again() -> None:
    x = large()
    address = x.data_ptr()
    del x
    assert POOL.free_bytes == MIB
    y = large()
    assert y.data_ptr() == address and POOL.free_bytes == 0


def test_block_lives_as_long_as_its_last_view() -> None:
    x = large()
    view = x.view(512, -1)[3:5, ::2]
    detached = view.detach().t()
    del x, view
    assert POOL.free_bytes == 0
    del detached
    assert POOL.free_bytes == MIB


def test_live_tensors_lie_apart() -> None:
    tensors = [large() for _ in range(8)]
    for number, x in enumerate(tensors):
        x.fill_(number)
    assert [float(x.mean()) for x in tensors] == list(range(8))


# bytes asked for, bytes of the block
SIZES = [
    (SMALLEST_POOLED, SMALLEST_POOLED),
    (SMALLEST_POOLED + 4, SMALLEST_POOLED + (1 << 16)),
    (2 * MIB, 2 * MIB),
    (2 * MIB + 4, 4 * MIB),
]


@pytest.mark.parametrize("row", SIZES, ids=str)
def test_sizes_are_rounded_up(row: tuple[int, int]) -> None:
    x = large(row[0])
    assert x.numel() * 4 == row[0]
    del x
    assert POOL.free_bytes == row[1]


@pytest.mark.parametrize("num_bytes", [SMALLEST_POOLED, MIB, 2 * MIB, 5 * MIB])
def test_alignment(num_bytes: int) -> None:
    tensors = [large(num_bytes) for _ in range(3)]
    step = 2 * MIB if num_bytes >= 2 * MIB else 4096
    assert all(x.data_ptr() % step == 0 for x in tensors)


def test_small_and_empty_tensors_are_plain() -> None:
    for shape in ((0,), (4, 0, 1 << 20), (), (SMALLEST_POOLED // 4 - 1,)):
        x = empty_strided(shape, torch.empty(shape).stride())
        assert x.shape == shape
    del x
    assert POOL.free_bytes == 0


LAYOUTS = [
    ((512, 513), (513, 1), torch.float32),
    ((512, 513), (1, 512), torch.bfloat16),
    ((300, 300), (1000, 2), torch.float64),
    ((600, 600), (0, 1), torch.float32),
    ((1 << 19,), (1,), torch.bool),
    ((1 << 19,), (1,), torch.float8_e4m3fn),
]


@pytest.mark.parametrize("row", LAYOUTS, ids=str)
def test_layout_is_as_asked(row: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]) -> None:
    shape, strides, dtype = row
    x = empty_strided(shape, strides, dtype)
    assert (x.shape, x.stride(), x.dtype) == (shape, strides, dtype)
    assert x.storage_offset() == 0 and not x.requires_grad


def test_other_sizes_are_left_alone() -> None:
    x = large(MIB)
    address = x.data_ptr()
    del x
    y = large(3 * MIB)
    assert y.data_ptr() != address and POOL.free_bytes == MIB


def test_limit() -> None:
    with config.patch({"cpu.pool_limit_bytes": 2 * MIB}):
        tensors = [large() for _ in range(5)]
        del tensors
        assert POOL.free_bytes == 2 * MIB
    POOL.clear()
    with config.patch({"cpu.pool_limit_bytes": 0}):
        x = large()
        del x
        assert POOL.free_bytes == 0


def test_tensors_survive_clearing() -> None:
    kept, dropped = large().fill_(3), large()
    del dropped
    POOL.clear()
    assert POOL.free_bytes == 0
    others = [large().fill_(9) for _ in range(4)]
    assert float(kept.min()) == float(kept.max()) == 3 and len(others) == 4
    del kept
    assert POOL.free_bytes == MIB


def test_tensor_survives_its_pool() -> None:
    own = Pool()
    x = torch.frombuffer(own.take(MIB), dtype=torch.float32, count=MIB // 4).fill_(5)
    del own
    assert float(x.sum()) == 5 * MIB / 4


def test_pooled_is_flat() -> None:
    x = pooled(MIB, torch.int64, 100)
    assert x.shape == (100,) and x.dtype is torch.int64


def test_threads_never_share_a_block() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(60):
            x = large(SMALLEST_POOLED).fill_(number)
            y = large(SMALLEST_POOLED + turn % 3 * (1 << 16)).fill_(-1)
            if float(x.min()) != number or float(x.max()) != number:
                wrong.append(number)
            del x, y

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    counted = sum(size * len(blocks) for size, blocks in POOL._free.items())
    assert POOL.free_bytes == counted > 0


def test_a_block_freed_in_another_thread_comes_back() -> None:
    held = [large()]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert POOL.free_bytes == MIB


def test_garbage_collected_while_a_block_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection may start anywhere, and what it finds may give back blocks of its own."""

    class Collecting(dict[int, Any]):
        def setdefault(self, size: int, blocks: Any) -> Any:
            gc.collect()
            return super().setdefault(size, blocks)

    def work() -> None:
        x, cycle = large(), [large()]
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        del x

    gc.collect()  # what other tests left must not come back in the middle
    POOL.clear()
    monkeypatch.setattr(POOL, "_free", Collecting())
    gc.disable()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=20)
    gc.enable()
    assert not thread.is_alive(), "the pool waits for itself"
    assert POOL.free_bytes == 2 * MIB


def test_huge_pages_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_ADVISE_HUGE", 9999)
    assert float(large(3 * MIB).fill_(1).mean()) == 1


def test_watchers_are_told_of_what_is_held() -> None:
    pool = Pool()
    seen: list[int] = []
    with pool.watched(seen.append):
        block = pool.take(3 << 20)
        assert pool.used_bytes == 4 << 20
        del block
    pool.take(1 << 20)
    assert seen == [4 << 20, -(4 << 20)]
    assert pool.used_bytes == 0
