"""Pooled memory: blocks come back with their last view, and a tensor over one is like any other."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from perfuse import config
from perfuse.runtime import pool
from perfuse.runtime.pool import POOL, Pool, allocator, release_memory
from perfuse.testing import run_and_get_code

MIB = 1 << 20
SMALLEST_POOLED = config.Settings().thresholds.pool_bytes
empty_strided = allocator(SMALLEST_POOLED)


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    POOL.shrink()
    yield
    POOL.shrink()


def large(num_bytes: int = MIB) -> torch.Tensor:
    return empty_strided((num_bytes // 4,), (1,), torch.float32)


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


@pytest.mark.parametrize("num_bytes", [SMALLEST_POOLED, SMALLEST_POOLED + 4, 2 * MIB, 2 * MIB + 4])
def test_a_storage_is_as_large_as_its_tensor(num_bytes: int) -> None:
    x = large(num_bytes)
    assert x.untyped_storage().nbytes() == num_bytes and x.data_ptr() % 64 == 0
    del x
    assert POOL.free_bytes == num_bytes


def test_small_and_empty_tensors_are_plain() -> None:
    for shape in ((0,), (4, 0, 1 << 20), (), (SMALLEST_POOLED // 4 - 1,)):
        x = empty_strided(shape, torch.empty(shape).stride(), torch.float32)
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
    POOL.shrink()
    with config.patch({"cpu.pool_limit_bytes": 0}):
        x = large()
        del x
        assert POOL.free_bytes == 0


def test_sizes_that_never_return_are_given_back() -> None:
    """One block of each of many sizes is in use at a time: the pool does not keep them all."""
    for number in range(64):
        large(4 * MIB + 4096 * number)
        assert POOL.free_bytes <= 64 * MIB
    used = [large(4 * MIB + 4096 * number) for number in range(40)]
    address = used[0].data_ptr()
    del used
    assert large(4 * MIB).data_ptr() == address, "what was in use at once is kept"


def test_tensors_survive_clearing() -> None:
    kept, dropped = large().fill_(3), large()
    del dropped
    POOL.shrink()
    assert POOL.free_bytes == 0
    others = [large().fill_(9) for _ in range(4)]
    assert float(kept.min()) == float(kept.max()) == 3 and len(others) == 4
    del kept
    assert POOL.free_bytes == MIB


def test_tensor_survives_its_pool() -> None:
    own = Pool()
    x = own.take((MIB // 4,), (1,), torch.float32, MIB).fill_(5)
    del own
    assert float(x.sum()) == 5 * MIB / 4


def test_a_held_storage_is_in_use() -> None:
    """Also where no tensor is left of it: the handle alone reads and writes the memory."""
    storage = large().fill_(3).untyped_storage()
    others = [large().fill_(9) for _ in range(3)]
    assert torch.empty(0).set_(storage).eq(3).all() and len(others) == 3
    address = storage.data_ptr()
    del storage
    assert large().data_ptr() == address


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "memoryview": lambda x: memoryview(x.numpy()),
    "dlpack": lambda x: x.__dlpack__(),
    "typed storage": lambda x: x.view(-1).untyped_storage(),
    "view of another type": lambda x: x.view(torch.int32)[5:],
    "saved for backward": lambda x: torch.ones(1, requires_grad=True).expand_as(x) * x,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_whoever_holds_it_keeps_it(name: str) -> None:
    x = large().fill_(3)
    address, holder = x.data_ptr(), HOLDERS[name](x)
    del x
    assert all(other.data_ptr() != address for other in [large() for _ in range(3)])
    del holder
    gc.collect()
    assert any(other.data_ptr() == address for other in [large() for _ in range(4)])


def test_a_resized_or_moved_storage_is_not_used_again() -> None:
    def shrunk(x: torch.Tensor) -> None:
        x.untyped_storage().resize_(16)

    def grown(x: torch.Tensor) -> None:
        x.resize_(MIB)

    def emptied(x: torch.Tensor) -> None:
        x.untyped_storage().resize_(0)

    def shared(x: torch.Tensor) -> None:
        x.share_memory_()

    for change in (shrunk, grown, emptied, shared):
        x = large()
        change(x)
        del x
        y = large().fill_(1)
        assert y.untyped_storage().nbytes() == MIB and not y.is_shared(), change.__name__
        assert float(y.sum()) == MIB // 4
        del y


@pytest.mark.parametrize("turn", range(2))  # a new block, then one used again
def test_a_tensor_is_like_any_other(turn: int) -> None:
    first = large() if turn else None
    del first
    x = large().fill_(1)
    assert not x._is_view() and x.is_leaf and not x.is_inference()
    w = torch.ones(MIB // 4, requires_grad=True)
    x.add_(w)
    x.sum().backward()
    assert w.grad is not None and x.requires_grad
    y = large()
    assert y.resize_(7).shape == (7,)
    assert y.set_(torch.zeros(3)).shape == (3,)


def test_inference_mode_reaches_neither_in_nor_out() -> None:
    with torch.inference_mode():
        x = large()
        assert x.is_inference()
        del x
    y = large().fill_(1)
    assert not y.is_inference()
    (y * torch.ones(1, requires_grad=True)).sum().backward()


def test_many_of_one_size_are_all_used_again() -> None:
    for _ in range(3):
        tensors = [large(SMALLEST_POOLED) for _ in range(100)]
        places = {x.data_ptr() for x in tensors}
        assert len(places) == 100
        del tensors
    # Those made before a search found free ones again are a few more at most.
    assert POOL.free_bytes <= 113 * SMALLEST_POOLED


def test_what_is_too_large_for_memory_is_pytorchs_error() -> None:
    used = POOL.used_bytes
    kept = [large() for _ in range(3)]
    del kept[1:]
    with pytest.raises(RuntimeError, match="allocate memory"):
        empty_strided((1 << 60,), (1,), torch.int8)
    # What lay idle was given back before giving up.
    assert POOL.free_bytes == 0 and MIB <= POOL.used_bytes <= used + MIB


def test_releasing_memory() -> None:
    kept, gone = large().fill_(2), large()
    del gone
    release_memory()
    assert POOL.free_bytes == 0 and float(kept.sum()) == 2 * MIB / 4


def test_a_lowered_limit_holds_at_once() -> None:
    x = large()
    del x
    before = config.snapshot().cpu.pool_limit_bytes
    try:
        config.assign("cpu.pool_limit_bytes", 0)
        assert POOL.free_bytes == 0
    finally:
        config.assign("cpu.pool_limit_bytes", before)


def test_threads_never_share_a_block() -> None:
    wrong: list[int] = []
    used = POOL.used_bytes  # results of other tests that nobody has collected yet

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
    assert POOL.free_bytes > 0 and POOL.used_bytes <= used


def test_a_block_freed_in_another_thread_comes_back() -> None:
    held = [large()]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert POOL.free_bytes == MIB


def test_a_block_asked_for_while_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage may be collected anywhere, and its finaliser may run a compiled function."""
    inner: list[torch.Tensor] = []
    popped = POOL._popped

    def collecting(num_bytes: int) -> Any:
        block = popped(num_bytes)
        if not inner:
            inner.append(large())
        return block

    x = large()
    del x
    monkeypatch.setattr(POOL, "_popped", collecting)
    thread = threading.Thread(target=lambda: inner.append(large()), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive(), "the pool waits for itself"
    assert len({y.data_ptr() for y in inner}) == 2


def test_huge_pages_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_ADVISE_HUGE", 9999)
    assert float(large(3 * MIB).fill_(1).mean()) == 1
    monkeypatch.setattr(pool, "_LIBC", None)
    assert float(large(5 * MIB).fill_(1).mean()) == 1


def test_a_bypassed_pool_keeps_nothing() -> None:
    own = Pool()
    with own.bypassed():
        own.take((MIB,), (1,), torch.int8, MIB)
    assert own.free_bytes == own.used_bytes == 0


def test_small_results_bypass_the_pool() -> None:
    """A call of the pool costs more than PyTorch's allocator, and small blocks are not kept."""
    large_rows = SMALLEST_POOLED // 4 // 64

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.sum(1)

    x = torch.randn(large_rows, 64)
    (doubled, sums), sources = run_and_get_code(torch.compile(both, backend="perfuse"), x)
    allocated = [line.split(" = ")[1] for line in sources[-1].splitlines() if " = empty_" in line]
    assert sorted(line.split("(")[0] for line in allocated) == ["empty_small", "empty_strided"]
    assert torch.equal(doubled, x * 2) and POOL.used_bytes == SMALLEST_POOLED
    for made in (doubled, sums):
        assert made._base is None and made.storage_offset() == 0
