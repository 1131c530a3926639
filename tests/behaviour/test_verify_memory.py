"""`verify="memory"`: programs run as ever, and generated code that strays is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import perfuse
from perfuse.codegen.cpp.emit import Emitter
from perfuse.codegen.host.program import HostWriter
from perfuse.codegen.triton.emit import Emitter as TritonEmitter
from perfuse.testing import fresh_cache, run_and_get_code
from tests.behaviour.row import Behaviour, randn


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    with fresh_cache(), perfuse.config.patch(verify="memory"):
        torch._dynamo.reset()
        yield


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with perfuse.config.patch({"gpu.interpret": request.param == "gpu"}):
        yield str(request.param)


def attention(x: Tensor, w: Tensor) -> Tensor:
    y = torch.softmax(F.gelu(x @ w) @ w.T, -1)
    return (y @ x).index_add(0, torch.arange(6) % 4, x[:6]).relu() @ w


def states(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.cumsum(-1)
    x.add_(1)
    return y[:, ::2], y.t(), (y > 0).any(0)


ROWS = [
    Behaviour("attention", attention, lambda: [randn(12, 12, grad=True), randn(12, 12, grad=True)]),
    Behaviour("views_and_mutation", states, lambda: [randn(5, 9)], num_calls=3),
    Behaviour("dynamic", lambda x: x.exp().sum(0) @ x.t(), lambda: [randn(7, 5)], dynamic=True),
    Behaviour("empty", lambda x: (x * 2, x.sum()), lambda: [randn(0, 4)]),
    Behaviour("halves", lambda x: F.layer_norm(x, (33,)).half() * 2, lambda: [randn(9, 33)]),
    Behaviour("lookups", lambda x: x[(x[:, 0] > 0).long()].argmax(1), lambda: [randn(9, 7)]),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_programs_run_as_ever(row: Behaviour, device: str) -> None:
    row.check()


def test_results_are_plain_tensors(device: str) -> None:
    x = randn(300, 300)
    made = torch.compile(lambda x: x + 1, backend="perfuse")(x)
    assert not made._is_view() and made.storage_offset() == 0
    assert made.untyped_storage().nbytes() == made.nbytes


def test_results_that_nothing_writes_are_plain_tensors(device: str) -> None:
    made = torch.compile(
        lambda x: (x + 1, torch.empty(0), x[:0] * 2, torch.empty(3)), backend="perfuse"
    )
    assert not any(result._is_view() for result in made(randn(3)))


def test_it_is_part_of_the_cache_key() -> None:
    with perfuse.config.patch(verify=True):
        checked = perfuse.config.snapshot().cache_key()
    with perfuse.config.patch(verify=False):
        assert perfuse.config.snapshot().cache_key() == checked
    assert perfuse.config.snapshot().cache_key() != checked


def two_steps(x: Tensor, w: Tensor) -> Tensor:
    return (torch.where(x @ w > 0, 1.0, 2.0) @ w).relu()


def compiled(fn: Callable[..., Any]) -> Any:
    return torch.compile(fn, backend="perfuse", dynamic=False)(randn(8, 8), randn(8, 8))


def test_a_temporary_at_the_wrong_place_is_named(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """One element too far, in the arena: the last one is in the band behind it."""
    right = HostWriter._fixed_pointers

    def shifted(self: HostWriter) -> tuple[tuple[int, int], ...]:
        return tuple((place, offset + 16) for place, offset in right(self))

    monkeypatch.setattr(HostWriter, "_fixed_pointers", shifted)
    with pytest.raises(perfuse.MemoryFault, match=r"k\d.*wrote out of bounds, \d+ bytes"):
        compiled(two_steps)


def test_a_result_at_the_wrong_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(self: HostWriter, name: str) -> None:
        self.w.line(f"P[{self.places[name]}] = {name}.data_ptr() - 4")

    monkeypatch.setattr(HostWriter, "_set_pointer", shifted)
    with pytest.raises(perfuse.MemoryFault, match=r"k\d wrote out of bounds.*4 bytes before b\d"):
        compiled(lambda x, w: x + w)


def test_a_value_that_is_not_written_is_not_a_number(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    for emitter in (Emitter, TritonEmitter):
        monkeypatch.setattr(emitter, "store", lambda *args, **kwargs: None)
    monkeypatch.setattr("perfuse.codegen.cpp.emit.Names.is_written", lambda *args: True)
    assert compiled(two_steps).isnan().all()


def test_temporaries_are_poisoned_when_they_end() -> None:
    """A call that keeps a view of the arena would find what it holds gone."""
    _, (_, host) = run_and_get_code(compiled, two_steps)
    assert host.count("memory.before(") == host.count("memory.after(") == 4
