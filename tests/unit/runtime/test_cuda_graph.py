"""CUDA graphs on a GPU that is played: what a replay reads, writes and lends."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from perfuse.codegen.host.tables import GpuTables
from perfuse.counters import Counters
from perfuse.runtime import cuda_graph
from perfuse.runtime.cuda_graph import Call, Recording, Replayed


def at_address(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it alive, as a graph does not."""
    memory = (ctypes.c_char * (tensor.numel() * 4)).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.float32).view(tensor.shape)


class PlayedGpu:
    """Runs the call again at each replay, on the very memory it was recorded with."""

    def __init__(self) -> None:
        self.now = 0
        self.capturing = False
        self.error: Exception | None = None
        self.num_replays = 0

    def stream(self) -> int:
        return self.now

    def is_capturing(self) -> bool:
        return self.capturing

    def record(self, call: Call, args: list[Any], written: Sequence[int]) -> Recording:
        if self.error is not None:
            raise self.error
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        outputs = call(list(args))
        for number in written:  # recording runs nothing
            args[number].copy_(before[number])
        addresses = [at_address(a) if isinstance(a, torch.Tensor) else a for a in args]

        def replay() -> None:
            self.num_replays += 1
            made = call(list(addresses))
            for own, new in zip(outputs, made, strict=True):
                own.copy_(new)

        return Recording(replay, outputs)


Made = tuple[Callable[..., Any], PlayedGpu, Counters]


def replayed(fn: Callable[..., Any], written: tuple[int, ...] = (), **options: Any) -> Made:
    def call(args: list[Any]) -> tuple[Any, ...]:
        given = list(args)
        args.clear()
        return tuple(fn(*given))

    gpu, counters = PlayedGpu(), Counters()
    chosen = {"num_cloned": 9, "num_warm_up": 1, "limit": 2, **options}
    unfit, is_dynamic = str(chosen.pop("unfit", "")), bool(chosen.pop("is_dynamic", False))
    tables = GpuTables("cpu", (), (), (), written, unfit, is_dynamic)
    run = Replayed(call, tables, gpu, counters, **chosen)
    return lambda *args: run(list(args)), gpu, counters


def test_parameters_stay_and_inputs_are_copied() -> None:
    run, gpu, counters = replayed(lambda x, w: (x @ w,))
    w = torch.randn(3, 3)
    kept = []
    for _ in range(6):
        x = torch.randn(2, 3)
        kept.append(x)  # so that each has other memory
        torch.testing.assert_close(run(x, w)[0], x @ w)
        w.mul_(1.5)  # in place: read where it is
    assert gpu.num_replays == 5
    assert counters.snapshot() == {"cudagraph.recorded": 1}


def test_nothing_is_collected_while_recording() -> None:
    """Freeing memory or code could end the capture."""
    seen: list[bool] = []

    def watched(x: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append(gc.isenabled())
        return (x + 1,)

    run, _, counters = replayed(watched)
    for _ in range(3):
        run(torch.ones(3))
    assert counters.snapshot() == {"cudagraph.recorded": 1}
    assert seen[0] and not seen[1] and gc.isenabled()


def test_inputs_that_are_written() -> None:
    def step(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor]:
        state.add_(x)
        return (state * 2,)

    run, gpu, _ = replayed(step, written=(1,))
    state, kept = torch.zeros(4), []
    for number in range(1, 5):
        (got,) = run(torch.ones(4), state)
        torch.testing.assert_close(state, torch.full((4,), float(number)))
        torch.testing.assert_close(got, state * 2)
    for _ in range(8):  # another tensor each time: copied in, and back
        other = torch.zeros(4)
        kept.append(other)
        run(torch.ones(4), other)
        torch.testing.assert_close(other, torch.ones(4))
    torch.testing.assert_close(state, torch.full((4,), 4.0))
    assert gpu.num_replays > 5


def test_small_results_are_the_users_own() -> None:
    run, _, _ = replayed(lambda x: (x + 1,))
    x = torch.zeros(4)
    kept = []
    for number in range(5):
        x.fill_(number)
        kept.append(run(x)[0])
    assert [int(k[0]) for k in kept] == [1, 2, 3, 4, 5]


def test_lent_results_are_never_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "CLONED_BYTES", 0)
    run, gpu, counters = replayed(lambda x: (x + 1,))
    x = torch.zeros(4)
    kept = []
    for number in range(4):
        x.fill_(number)
        kept.append(run(x)[0][1:])  # a window on it holds it too
    assert [int(k[0]) for k in kept] == [1, 2, 3, 4]
    assert counters.snapshot()["cudagraph.plain.results_in_use"] == 2
    kept.clear()
    before = gpu.num_replays
    x.fill_(9)
    assert int(run(x)[0][0]) == 10
    assert gpu.num_replays == before + 1


def test_results_that_share_memory_are_lent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = x + 1
        return both[:2], both[2:]

    monkeypatch.setattr(cuda_graph, "CLONED_BYTES", 0)
    run, gpu, counters = replayed(halves)
    x = torch.arange(4.0)
    for _ in range(4):
        low, high = run(x)
        torch.testing.assert_close(torch.cat([low, high]), x + 1)
        del low, high
    assert gpu.num_replays == 3
    assert counters.snapshot() == {"cudagraph.recorded": 1}


def test_sizes_have_graphs_of_their_own_up_to_a_limit() -> None:
    run, gpu, counters = replayed(lambda n, x: (x * n,), is_dynamic=True)
    for _ in range(3):
        for size in (2, 3, 4):
            x = torch.randn(size)
            torch.testing.assert_close(run(size, x)[0], x * size)
    assert counters.snapshot()["cudagraph.recorded"] == 2
    assert counters.snapshot()["cudagraph.plain.too_many_sizes"] == 3
    assert gpu.num_replays == 4


def test_a_forward_and_its_backward() -> None:
    forward, _, _ = replayed(lambda x, w: (x @ w, x * 2), num_cloned=1)
    backward, gpu, counters = replayed(
        lambda saved, g: (saved.t() @ g,), num_cloned=0, num_warm_up=2
    )
    w, kept = torch.randn(3, 3), []
    for _ in range(6):
        x, g = torch.randn(2, 3), torch.randn(2, 3)
        kept += [x, g]
        out, saved = forward(x, w)
        torch.testing.assert_close(out, x @ w)
        (gradient,) = backward(saved, g)
        torch.testing.assert_close(gradient, (x * 2).t() @ g)
        del out, saved, gradient
    assert gpu.num_replays == 4
    assert counters.snapshot() == {"cudagraph.recorded": 1}


def test_what_runs_without_its_graph() -> None:
    run, gpu, counters = replayed(lambda x: (x + 1,))
    x = torch.zeros(4)
    run(x), run(x)
    gpu.now = 7
    run(x)
    gpu.now, gpu.capturing = 0, True
    run(x)
    assert counters.snapshot()["cudagraph.plain.another_stream"] == 1
    assert counters.snapshot()["cudagraph.plain.captured_by_user"] == 1
    assert gpu.num_replays == 1


def test_a_failed_capture_is_not_tried_again() -> None:
    run, gpu, counters = replayed(lambda x: (x + 1,))
    gpu.error = RuntimeError("operation not permitted when stream is capturing")
    x = torch.zeros(4)
    for _ in range(3):
        torch.testing.assert_close(run(x)[0], x + 1)
    assert counters.snapshot() == {"cudagraph.refused.capture_failed": 1}


def test_an_error_of_the_program_is_the_users() -> None:
    run, gpu, _ = replayed(lambda x: (x + 1,))
    gpu.error = ValueError("something else")
    run(torch.zeros(4))
    with pytest.raises(ValueError, match="something else"):
        run(torch.zeros(4))


def test_reasons_known_beforehand() -> None:
    run, gpu, counters = replayed(lambda x: (x + 1,), unfit="call_of_nonzero")
    for _ in range(3):
        run(torch.zeros(4))
    assert counters.snapshot() == {"cudagraph.refused.call_of_nonzero": 1}
    assert gpu.num_replays == 0


def test_a_result_that_is_an_input() -> None:
    run, _, counters = replayed(lambda x: (x, x + 1))
    x = torch.zeros(4)
    for _ in range(3):
        same, _ = run(x)
        assert same is x
    assert counters.snapshot() == {"cudagraph.refused.result_is_an_input": 1}
