"""Updates of inputs and of temporaries: values as eager's, and no more memory moved than needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import perfuse
from perfuse.testing import fresh_cache
from tests.behaviour.row import Behaviour, randn
from tests.harness.backend import compiled
from tests.harness.compare import assert_as_good_as_eager

AT = torch.tensor([5, 0, -3])  # a negative index counts from the end
TWICE = torch.tensor([5, 0, 5])
COLUMNS = torch.tensor([[1, 0, 2], [3, 1, 0]])


def put(buffer: Tensor, x: Tensor) -> Tensor:
    buffer[AT] = x
    return buffer.sum(0)


def put_equal_values_twice(buffer: Tensor, x: Tensor) -> Tensor:
    buffer[TWICE] = x[0]
    return buffer * 2


def read_before_and_after(buffer: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    before = buffer.exp().sum(0)
    buffer[AT] = x
    return before, buffer.sum(0)


def old_rows_after(buffer: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The old value is needed when the new one exists."""
    old = buffer.clone()
    buffer[AT] = x
    return old @ buffer.T, buffer - old


def old_part_after(buffer: Tensor, x: Tensor) -> Tensor:
    first, second = buffer.clone().split(16)
    buffer[AT] = x
    return first + second * buffer[:16]


def from_its_own_rows(buffer: Tensor, x: Tensor) -> Tensor:
    buffer[AT] = buffer[AT.flip(0)] + x
    return buffer + 1


def added_to_its_own_rows(buffer: Tensor, x: Tensor) -> Tensor:
    buffer[TWICE] += x  # the last one counts, both read the old row
    return buffer.sum()


def indexed_by_itself(buffer: Tensor, x: Tensor) -> Tensor:
    at = (buffer[:3, 0] > 0).long()
    buffer[at, torch.arange(3)] = x[0, :3]
    return buffer * 3


def several(buffer: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    buffer[AT] = x
    middle = buffer.sum(0)
    buffer[AT + 1] = middle
    buffer[:, 3] = 7.0
    return middle, buffer.amax(1)


def shifted(buffer: Tensor, x: Tensor) -> Tensor:
    buffer[:-1] = buffer[1:].clone()
    buffer[-1] = x[0]
    return buffer.mean(0)


def through_views(buffer: Tensor, x: Tensor) -> Tensor:
    view = buffer.view(4, 8, -1)[2]
    view[:, 1:4] = x.T[:8, :3]
    view.diagonal().copy_(x[0, :8])
    buffer.t()[:3, 4] = x[:, 1]
    return buffer.sum(1)


def through_a_view_with_a_reader(buffer: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    part = buffer[4:20]
    outside = buffer[:10].clone()
    part[AT] = x
    return part.sum(0), outside * buffer[:10]


def every_other(buffer: Tensor, x: Tensor) -> Tensor:
    buffer[1:7:2] = x
    return buffer.sum(0)


def returned(buffer: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    buffer[AT] = x
    return buffer, buffer[2:9]


def copy_returned(buffer: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    buffer[AT] = x
    return buffer.clone(), buffer + 1


def replaced_afterwards(buffer: Tensor, x: Tensor) -> Tensor:
    new = torch.index_put(buffer, (AT,), x)
    buffer.copy_(new.flip(0))
    return new.sum(0)


def not_written(buffer: Tensor, x: Tensor) -> Tensor:
    return torch.index_put(buffer, (AT,), x).sum(0)


def scattered(buffer: Tensor, x: Tensor) -> Tensor:
    buffer.scatter_(0, COLUMNS, x[:2, :3])
    buffer.scatter_add_(1, COLUMNS, x[:2, :3])
    buffer.scatter_reduce_(0, COLUMNS, x[:2, :3], "sum", include_self=False)
    return buffer.index_add_(0, TWICE, x, alpha=2).sum(1)


def filled(buffer: Tensor, x: Tensor) -> Tensor:
    buffer.index_fill_(1, AT, 3.0).masked_fill_(buffer > 2, 0)
    return buffer.index_copy_(0, AT.abs(), x).amax(0)


def of_a_temporary(buffer: Tensor, x: Tensor) -> Tensor:
    made = (buffer @ x.T).relu().cumsum(0)
    made[AT] = 3.0
    seen = made.sum()
    made[AT + 1, 1] = 4.0
    return made * seen


def of_a_temporary_with_a_reader(buffer: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    made = buffer.cumsum(0)
    other = made.clone()
    other[AT] = x
    return made + 1, other


def of_a_sum_that_is_stored_in_another_type(buffer: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    total, largest = buffer.sum(1), buffer.amax(0)
    total[AT] = 3.0
    return total.bfloat16(), largest.scatter(0, AT.abs(), 50.0).double()


def of_a_sum_that_fills_an_input(buffer: Tensor, x: Tensor) -> Tensor:
    total = (x[:, None] * x[0, :32, None]).sum(0)
    total[AT] = x
    buffer.copy_(total)
    return x.cumsum(0)


def same_input_twice(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    a[AT] = x
    return b.sum(0) + a[0]


ROWS = [
    put, put_equal_values_twice, read_before_and_after, old_rows_after, old_part_after,
    from_its_own_rows, added_to_its_own_rows, indexed_by_itself, several, shifted, through_views,
    through_a_view_with_a_reader, every_other, returned, copy_returned, replaced_afterwards,
    not_written, scattered, filled, of_a_temporary, of_a_temporary_with_a_reader,
    of_a_sum_that_is_stored_in_another_type, of_a_sum_that_fills_an_input,
]  # fmt: skip


# Rows that go through every rule, for what takes longer.
CORE = [old_part_after, several, shifted, through_views, scattered, of_a_temporary]


def _inputs() -> list[Any]:
    return [randn(32, 512), randn(3, 512)]


def _row(function: Callable[..., Any], dynamic: bool = False) -> Behaviour:
    return Behaviour(function.__name__, function, _inputs, num_calls=2, dynamic=dynamic)


@pytest.mark.parametrize("function", ROWS, ids=lambda f: f.__name__)
def test_as_eager(function: Callable[..., Any]) -> None:
    _row(function).check()


@pytest.mark.parametrize("function", CORE, ids=lambda f: f.__name__)
def test_as_eager_with_watched_memory(function: Callable[..., Any]) -> None:
    with perfuse.config.patch(verify="memory"):
        _row(function).check()


@pytest.mark.parametrize("function", [several, through_views], ids=lambda f: f.__name__)
def test_as_eager_with_dynamic_sizes(function: Callable[..., Any]) -> None:
    _row(function, dynamic=True).check()


@pytest.mark.parametrize("function", CORE, ids=lambda f: f.__name__)
def test_as_eager_on_a_gpu(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfuse.lower.mutations._WORTHWHILE_GPU_BYTES", 1)
    with fresh_cache(), perfuse.config.patch({"gpu.interpret": True}):
        _row(function).check()


def test_the_same_input_twice() -> None:
    def inputs() -> list[Any]:
        buffer = randn(32, 512)
        return [buffer, buffer, randn(3, 512)]

    Behaviour("same_input_twice", same_input_twice, inputs, num_calls=2).check()


def test_overlapping_inputs() -> None:
    def inputs() -> list[Any]:
        buffer = randn(40, 512)
        return [buffer[:32], buffer[3:35], randn(3, 512)]

    Behaviour("overlapping", same_input_twice, inputs, num_calls=2).check()


def test_positions_that_are_python_numbers() -> None:
    def store(buffer: Tensor, x: Tensor, at: int) -> Tensor:
        buffer[:2, at : at + 3] = x
        buffer[3, at] = x[1]
        return buffer[:2, : at + 1].sum(1)

    store_compiled, before = compiled(store, dynamic=None), perfuse.counters.snapshot()
    given = [torch.zeros(4, 32, 256), torch.zeros(4, 32, 256)]
    for at in (0, 4, 5, 17, 29, -3 - 1, -5, 8):
        x = randn(3, 256) + at
        eager, made = store(given[0], x, at), store_compiled(given[1], x, at)
        assert_as_good_as_eager((made, given[1]), (eager, given[0]), None)
    more = perfuse.counters.snapshot().items() - before.items()
    assert not any("_scatter" in name for name, _ in more)
    for at in (30, 32):
        with pytest.raises((RuntimeError, IndexError)):
            store_compiled(given[1], x, at)


class Window(nn.Module):
    """A buffer that a training step updates and reads, and statistics beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(16, 16))
        self.register_buffer("seen", torch.zeros(64, 16))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        self.seen[self.step % 64] = y.detach().mean(0)
        self.step += 1
        return (y * self.seen.mean(0)).sum() + y.exp().mean()


def test_a_training_step() -> None:
    eager, ours, exact = Window(), Window(), Window().double()
    step = compiled(ours)
    for _ in range(3):
        x = randn(8, 16)
        for made in (eager(x), step(x), exact(x.double())):
            made.backward()
    assert_as_good_as_eager(_state(ours), _state(eager), _state(exact))


def _state(module: Window) -> list[Tensor]:
    grad = module.weight.grad
    assert grad is not None
    return [module.seen, module.step, grad]


def put_at(buffer: Tensor, at: Tensor, x: Tensor) -> Tensor:
    buffer[at] = x
    return buffer.sum()


def add_at(buffer: Tensor, at: Tensor, x: Tensor) -> Tensor:
    return buffer.index_add_(0, at, x).sum()


@pytest.mark.parametrize("function", [put_at, add_at], ids=lambda f: f.__name__)
def test_an_index_out_of_range_raises_and_writes_nothing(function: Callable[..., Any]) -> None:
    fn = compiled(function)
    for at in (32, -33, 3, 99):
        buffer = randn(32, 512)
        before, arguments = buffer.clone(), (buffer, torch.tensor([at]), randn(1, 512))
        if at == 3:
            fn(*arguments)
            assert not torch.equal(buffer, before)
            continue
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            fn(*arguments)
        assert torch.equal(buffer, before)


# -- how much is moved ---------------------------------------------------------------------


def slice_stored(buffer: Tensor, x: Tensor) -> Tensor:
    buffer[4:7] = x
    return buffer[5] * 2


def row_stored(buffer: Tensor, x: Tensor) -> Tensor:
    buffer.view(4, 8, -1)[1, 3:6] = x
    return buffer[11] * 2


def rows_put(buffer: Tensor, x: Tensor) -> Tensor:
    buffer[AT] = x
    return buffer[5] * 2


def rows_put_in_a_view(buffer: Tensor, x: Tensor) -> Tensor:
    buffer.view(4, 8, -1)[1][AT] = x
    return buffer[5] * 2


def rows_put_across(buffer: Tensor, x: Tensor) -> Tensor:
    buffer.t()[:, AT] = x.t()
    return buffer[5] * 2


def rows_added(buffer: Tensor, x: Tensor) -> Tensor:
    return buffer.index_add_(0, TWICE, x)[5] * 2


IN_PLACE = [slice_stored, row_stored, rows_put, rows_put_in_a_view, rows_put_across, rows_added]


@pytest.mark.parametrize("function", IN_PLACE, ids=lambda f: f.__name__)
def test_nothing_but_the_update_is_written(function: Callable[..., Any]) -> None:
    _row(function).check()
    with torch.no_grad():
        found = perfuse.explain(function, *_inputs())
    assert found.num_kernels == 2
    stores = [line for line in found.stage("program").splitlines() if "] = " in line]
    assert len(stores) == 2 and all("d0<32" not in line for line in stores), stores


class Decoder(nn.Module):
    """Attention of one query to a cache in which its key and value are stored; heads in pairs."""

    def __init__(self, *, repeats: bool) -> None:
        super().__init__()
        self.repeats = repeats
        for name in ("keys", "values"):
            self.register_buffer(name, randn(2, 2, 256, 16))

    def forward(self, query: Tensor, key: Tensor, at: Tensor) -> Tensor:
        self.keys.index_copy_(2, at, key)
        self.values[:, :, at] = key * 2
        keys, values = self.keys, self.values
        if self.repeats:
            keys, values = (_repeated(x) for x in (keys, values))
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=not self.repeats)


def _repeated(x: Tensor) -> Tensor:
    batch, heads, length, size = x.shape
    return x[:, :, None].expand(batch, heads, 2, length, size).reshape(batch, -1, length, size)


@pytest.mark.parametrize("repeats", [True, False], ids=["repeated", "shared"])
def test_a_decoding_step_moves_no_cache(repeats: bool) -> None:
    arguments = (randn(2, 4, 1, 16), randn(2, 2, 1, 16), torch.tensor([7]))
    eager, ours = Decoder(repeats=repeats), Decoder(repeats=repeats)
    with torch.no_grad():
        expected, exact = eager(*arguments), Decoder(repeats=repeats).double()
        made = compiled(ours)(*arguments)
        wide = exact(*(x.double() if x.is_floating_point() else x for x in arguments))
        (graph,) = perfuse.explain(ours, *arguments).graphs
    assert_as_good_as_eager(made, expected, wide)
    assert torch.equal(ours.keys, eager.keys) and torch.equal(ours.values, eager.values)
    cache = ours.keys.numel() * 4
    assert sum(kernel.num_bytes for kernel in graph.kernels) < 3 * cache  # each read once


def _add(x: Tensor) -> None:
    x.add_(1)


def _double_rows(x: Tensor) -> None:
    x[1:].mul_(2)


@pytest.mark.parametrize("update", [_add, _double_rows])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, : x.shape[1] - 1],
        lambda x: x.t()[x.shape[1] // 2 :],
        lambda x: x.unflatten(1, (2, x.shape[1] // 2)),
        lambda x: x.chunk(2, 1)[1],
        lambda x: x.as_strided((2, 3), x.stride(), x.storage_offset()),
    ],
)
def test_views_of_an_overwritten_input_are_in_its_memory(
    update: Callable[[Tensor], None], view: Callable[[Tensor], Tensor]
) -> None:
    """Views that depend on sizes had the strides and the offset of the new value."""

    def updated(x: Tensor) -> Tensor:
        update(x)
        return view(x)

    program = torch.compile(updated, backend="perfuse", dynamic=True)
    for rows, columns, start, stop in ((10, 12, 2, 10), (9, 16, 3, 9), (7, 20, 4, 14)):
        mine = torch.arange(float(rows * columns)).reshape(rows, columns)
        theirs = mine.clone()
        got, expected = program(mine[:, start:stop]), updated(theirs[:, start:stop])
        assert torch.equal(got, expected) and torch.equal(mine, theirs)
        assert got.stride() == expected.stride()
        assert got.storage_offset() == expected.storage_offset()
        assert got.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()


@pytest.mark.parametrize("update", [_add, _double_rows])
def test_views_of_a_buffer_overwritten_in_training_are_in_its_memory(
    update: Callable[[Tensor], None],
) -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        update(x)
        return (x * w).sum(), x[:, : x.shape[1] - 1]

    program = torch.compile(step, backend="perfuse", dynamic=True)
    for rows, columns, start, stop in ((10, 12, 2, 10), (9, 16, 3, 9), (7, 20, 4, 14)):
        mine = torch.arange(float(rows * columns)).reshape(rows, columns)
        theirs = mine.clone()
        w, v = (torch.full((stop - start,), 2.0, requires_grad=True) for _ in range(2))
        loss, got = program(mine[:, start:stop], w)
        expected_loss, expected = step(theirs[:, start:stop], v)
        loss.backward()
        expected_loss.backward()
        assert torch.equal(got, expected) and torch.equal(mine, theirs)
        assert w.grad is not None and v.grad is not None and torch.equal(w.grad, v.grad)
        assert got.stride() == expected.stride()
        assert got.storage_offset() == expected.storage_offset()
        assert got.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
