"""Casts of weights: one a step, never a stale one, and none that outlives its use."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import perfuse
from perfuse.precision.cast_cache import CASTS
from tests.harness.autocast import CastCounter, OwnLinear

BF16 = torch.bfloat16


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 3)


@pytest.fixture
def weight() -> Iterator[nn.Parameter]:
    CASTS.release()
    yield nn.Parameter(torch.randn(4, 3))
    assert CASTS.num_held() == 0


def test_a_weight_is_cast_once_a_region(x: Tensor, weight: nn.Parameter) -> None:
    with CastCounter(weight) as counter:
        with perfuse.autocast("cpu"):
            with perfuse.autocast("cpu"):
                first = F.linear(x, weight)
            second = x @ weight.t() + F.linear(x, weight)
        (first + second).sum().backward()
    assert counter.count == 1
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_each_dtype_has_its_cast(x: Tensor, weight: nn.Parameter) -> None:
    with perfuse.autocast("cpu"), CastCounter(weight) as counter:
        for dtype in (torch.bfloat16, torch.float16) * 2:
            with perfuse.autocast("cpu", dtype):
                assert F.linear(x, weight).dtype == dtype
    assert counter.count == 2


def test_the_cache_can_be_off(x: Tensor, weight: nn.Parameter) -> None:
    for outer in (True, False):
        around = perfuse.autocast("cpu", cache_enabled=outer)
        inside = perfuse.autocast("cpu", cache_enabled=False)
        with around, inside, CastCounter(weight) as counter:
            F.linear(x, weight), F.linear(x, weight)
        assert counter.count == 2


@pytest.mark.parametrize("change", ["add", "copy", "data", "optimizer"])
def test_a_changed_weight_is_cast_again(x: Tensor, weight: nn.Parameter, change: str) -> None:
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    with perfuse.autocast("cpu"):
        before = F.linear(x, weight)
        with torch.no_grad():
            if change == "add":
                weight.add_(1)
            elif change == "copy":
                weight.copy_(weight + 1)
            elif change == "data":
                weight.data = weight.data + 1
            else:
                optimizer.step()
        after = F.linear(x, weight)
        assert torch.equal(after, F.linear(x.bfloat16(), weight.detach().bfloat16()))
    assert not torch.equal(before, after)


def test_a_cast_without_a_graph_is_not_used_with_one(x: Tensor, weight: nn.Parameter) -> None:
    with perfuse.autocast("cpu"):
        with torch.no_grad():
            F.linear(x, weight)
        F.linear(x, weight).sum().backward()
    assert weight.grad is not None
    CASTS.release()


def test_a_cast_of_inference_mode_stays_there(x: Tensor, weight: nn.Parameter) -> None:
    with perfuse.autocast("cpu"):
        with torch.inference_mode():
            F.linear(x, weight), F.linear(x, weight)
        with torch.no_grad():
            assert not F.linear(x, weight).is_inference()
        assert CASTS.num_held() == 2
    CASTS.release()


def test_results_in_given_memory_have_no_casts(x: Tensor, weight: nn.Parameter) -> None:
    with torch.no_grad():
        given = torch.empty(3, 3)
        with perfuse.autocast("cpu", policy={"mm": "lower"}):
            assert torch.mm(weight.t(), weight, out=given) is given
    assert torch.equal(given, weight.t().detach() @ weight.detach())


def test_recomputed_casts_do_not_outlive_their_region(weight: nn.Parameter) -> None:
    """Checkpoints run forwards inside of a backward."""
    seen = []

    def layer(x: Tensor) -> Tensor:
        try:
            with perfuse.autocast("cpu"):
                return F.linear(x, weight)
        finally:  # a checkpoint leaves its function early, as soon as it has what it needs
            seen.append(CASTS.num_held())

    x = torch.randn(2, 3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert seen == [0, 0]


def test_forward_and_backward_of_a_custom_function_share_a_cast(
    x: Tensor, weight: nn.Parameter
) -> None:
    with CastCounter(weight) as counter:
        for step in range(2):
            with perfuse.autocast("cpu"):
                loss = OwnLinear.apply(x, weight).sum()
            loss.backward()
            assert counter.count == step + 1
            assert CASTS.num_held() == 0
            with torch.no_grad():
                weight.sub_(0.1)


def test_tensors_that_cuda_graphs_update_are_not_cached(x: Tensor, weight: nn.Parameter) -> None:
    try:
        torch._C._set_cached_tensors_enabled(True)
        torch._C._add_cached_tensor(weight)
        with CastCounter(weight) as counter:
            with perfuse.autocast("cpu"):
                loss = OwnLinear.apply(x, weight).sum()
            loss.backward()
        assert counter.count == 2
    finally:
        torch._C._set_cached_tensors_enabled(False)


def test_nothing_is_held_after_a_region(x: Tensor, weight: nn.Parameter) -> None:
    with perfuse.autocast("cpu"):
        F.linear(x, weight)
        assert CASTS.num_held() == 1
    assert CASTS.num_held() == 0
    with torch.no_grad(), perfuse.autocast("cpu"):
        F.linear(x, weight)
    assert CASTS.num_held() == 0


def test_nothing_is_held_after_an_early_exit(x: Tensor, weight: nn.Parameter) -> None:
    def fails() -> None:
        with perfuse.autocast("cpu"):
            with torch.no_grad():
                F.linear(x, weight)
            raise KeyError

    def outputs() -> Iterator[Tensor]:
        with perfuse.autocast("cpu"):
            yield F.linear(x, weight)
            yield F.linear(x, weight)

    with pytest.raises(KeyError):
        fails()
    assert CASTS.num_held() == 0
    generator = outputs()
    next(generator)
    del generator
    gc.collect()
    assert CASTS.num_held() == 0
    assert not torch.is_autocast_enabled("cpu")


def test_the_cache_keeps_no_weight_alive(x: Tensor) -> None:
    weight = nn.Parameter(torch.randn(4, 3))
    with torch.no_grad(), perfuse.autocast("cpu"):
        F.linear(x, weight)
        watch = weakref.ref(weight)
        del weight
        gc.collect()
        assert watch() is None


def test_threads_do_not_disturb_each_other(x: Tensor, weight: nn.Parameter) -> None:
    """A thread that leaves its region drops its own casts, and no one else's."""

    def other() -> None:
        with perfuse.autocast("cpu"):
            F.linear(x, weight).sum().backward()
            seen.append(CASTS.num_held())
        seen.append(CASTS.num_held())

    seen: list[int] = []
    with perfuse.autocast("cpu"), CastCounter(weight) as counter:
        F.linear(x, weight)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
        F.linear(x, weight)
    assert seen == [1, 0]
    assert counter.count == 1  # of this thread: a mode belongs to one


@contextmanager
def native_lstm() -> Iterator[None]:
    """PyTorch's own LSTM: oneDNN has none in bfloat16 for every processor."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def test_an_lstm_is_that_of_pytorch_and_sees_changed_weights() -> None:
    torch.manual_seed(0)
    lstm, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)

    def run(region: Any, is_changed: bool) -> list[Tensor]:
        lstm.zero_grad()
        with native_lstm(), region("cpu"):
            if is_changed:
                lstm(x)
                with torch.no_grad():
                    lstm.weight_hh_l0.mul_(2)
            result = lstm(x)[0]
        result.float().sum().backward()
        return [result.detach(), *(p.grad.clone() for p in lstm.parameters())]

    assert all(map(torch.equal, run(torch.autocast, False), run(perfuse.autocast, False)))
    changed = run(perfuse.autocast, True)
    assert all(map(torch.equal, changed, run(torch.autocast, False)))
