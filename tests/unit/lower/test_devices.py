"""Graphs of a GPU that also touch the CPU: what is computed where, and what is moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from perfuse import config
from perfuse.capture.cross_compile import GPU, CrossCompile, GeneratedGraph
from perfuse.capture.cross_compile import generated as generated_graph
from perfuse.context import Context
from perfuse.counters import Counters
from perfuse.target import target_of
from perfuse.testing import fresh_cache
from perfuse.torch_compat.devices import fake_gpu
from perfuse.torch_compat.registration import reset_dynamo


@pytest.fixture(autouse=True)
def own_cache() -> Iterator[None]:
    reset_dynamo()
    with fresh_cache():
        yield
    reset_dynamo()


def generated(
    fn: Callable[..., Any], *devices_and_shapes: tuple[str, tuple[int, ...]]
) -> GeneratedGraph:
    settings = config.snapshot()
    context = Context(target_of("cuda:90", settings), settings, Counters(), GPU)
    graphs: list[GeneratedGraph] = []
    backend = CrossCompile([context], lambda *graph: graphs.append(generated_graph(*graph)))
    with fake_gpu():
        args = [torch.empty(shape, device=device) for device, shape in devices_and_shapes]
        torch.compile(fn, backend=backend, fullgraph=True)(*args)
    (graph,) = graphs
    return graph


def test_a_number_on_the_cpu_is_moved_once() -> None:
    graph = generated(lambda x, s: (x * s + s).sum(1), ("cuda", (64, 64)), ("cpu", ()))
    assert graph.plan.count("aten._to_copy") == 1
    assert (
        "op_aten__to_copy_default(i1, device=torch.device('cuda:0'), non_blocking=True)"
        in graph.host
    )
    assert len(graph.objects) == 1


def test_a_number_that_the_graph_spells_out_is_in_the_kernel() -> None:
    graph = generated(lambda x: x * torch.tensor(2.5), ("cuda", (64,)))
    assert "aten" not in graph.plan
    assert "2.5" in graph.kernels


def test_a_small_product_is_a_loop() -> None:
    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x + 1) @ y * 2, -1)

    small = generated(chain, ("cuda", (16, 32)), ("cuda", (32, 64)))
    assert "aten" not in small.plan
    assert small.host.count("launch(") == 1
    large = generated(chain, ("cuda", (64, 32)), ("cuda", (32, 64)))
    assert "aten.mm.out" in large.plan


def test_work_on_the_cpu_stays_there() -> None:
    graph = generated(lambda x, y: (x + 1, y.exp() * 2), ("cuda", (64,)), ("cpu", (8,)))
    assert "aten.exp.default(i1)" in graph.plan
    assert "i1.data_ptr()" not in graph.host


def test_a_copy_to_the_gpu_is_a_call_and_what_follows_is_fused() -> None:
    graph = generated(lambda x, y: x + y.to(x.device) * 2, ("cuda", (64,)), ("cpu", (64,)))
    assert "aten._to_copy.default(i" in graph.plan
    assert len(graph.objects) == 1


def test_a_copy_to_the_cpu_is_a_call() -> None:
    graph = generated(lambda x: (x * 2).to("cpu"), ("cuda", (64,)))
    assert "aten._to_copy.default" in graph.plan
    assert len(graph.objects) == 1


def test_tensors_made_on_the_gpu() -> None:
    graph = generated(lambda x: x + torch.arange(64, device="cuda"), ("cuda", (64,)))
    assert "aten" not in graph.plan


def test_random_seeds_come_from_the_device() -> None:
    graph = generated(lambda x: torch.rand_like(x) + x, ("cuda", (64,)))
    assert "seeds = new_seeds(1)" in graph.host
