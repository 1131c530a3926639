"""A captured graph is called without a profiler's marks, and other backends keep theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.profiler import ProfilerActivity, profile

from perfuse.capture.backend import perfuse_backend

MARK = "Pregraph bytecode"


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def double(x: Tensor) -> Tensor:
    return x.sin() * 2


def rows_of(fn: Callable[..., Any], *args: Any) -> list[str]:
    fn(*args)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        fn(*args)
    return [event.name for event in seen.events()]


@pytest.mark.parametrize("times", [1, 2])
def test_calls_have_no_marks_and_those_of_others_do(times: int) -> None:
    for _ in range(times):
        torch._dynamo.reset()  # which forgets who wanted to know of captures
        assert MARK not in rows_of(torch.compile(double, backend="perfuse"), torch.ones(3))
        assert torch._dynamo.config.record_runtime_overhead
        torch._dynamo.reset()
        assert MARK in rows_of(torch.compile(double, backend="eager"), torch.ones(3))


def test_a_failed_capture_puts_the_setting_back() -> None:
    def fails(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        perfuse_backend(module, inputs)
        raise ValueError("of the test")

    with pytest.raises(Exception, match="of the test"):
        torch.compile(double, backend=fails)(torch.ones(3))
    assert torch._dynamo.config.record_runtime_overhead


def test_whoever_switched_marks_off_finds_them_off() -> None:
    with torch._dynamo.config.patch(record_runtime_overhead=False):
        torch.compile(double, backend="perfuse")(torch.ones(3))
        assert not torch._dynamo.config.record_runtime_overhead


def test_a_backend_called_by_itself_changes_nothing() -> None:
    captured: list[tuple[GraphModule, list[Any]]] = []

    def keeps(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        captured.append((module, list(inputs)))
        return module.forward

    torch.compile(double, backend=keeps)(torch.ones(3))
    module, _ = captured[0]
    perfuse_backend(module, [torch.ones(3)])
    assert torch._dynamo.config.record_runtime_overhead
