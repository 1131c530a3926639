"""Equal expressions once, and nothing that only looks equal."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from perfuse.graph.cse import fx_graph_cse
from tests.unit.graph.tracing import assert_same_values


def check(gm: fx.GraphModule, num_fewer: int | None, *args: Tensor) -> None:
    """The graph shrinks by so many nodes (None: any number), and a second run changes nothing."""
    graph = fx_graph_cse(gm.graph)
    before, after = len(gm.graph.nodes), len(graph.nodes)
    assert after <= before if num_fewer is None else before - after == num_fewer
    assert len(fx_graph_cse(graph).nodes) == after
    if args:
        assert_same_values(gm, fx.GraphModule(gm, graph), *args)


def plain_chain(x: Tensor) -> Tensor:
    b = x + (x + 1)
    return b + (x + x)


def sums_by_axis(x: Tensor) -> Tensor:
    a, b = x.sum(dim=1), x.sum(dim=1, keepdim=True)
    return a + b + x.sum(dim=1, keepdim=True) + x.sum(dim=1)


CASES: list[tuple[Callable[[Tensor], Any], int]] = [
    (plain_chain, 0),
    (lambda x: None, 0),
    (sums_by_axis, 2),
    (lambda x: x.sum() + x.sum() + x.sum() + x.sum(), 3),
    (lambda x: torch.cat((x, x)) + torch.cat((x, x)), 1),
    (lambda x: torch.ones_like(x) + torch.ones_like(x), 1),
    (lambda x: (x * 1) + (x * 1.0) + (x * True), 0),
    (lambda x: (x * float("nan")) + (x * float("nan")), 1),
    (lambda x: (x * 0.0) + (x * -0.0), 0),
    (lambda x: x.sum(dtype=torch.float64) + x.sum(dtype=torch.float32), 0),
    (lambda x: (x.sin() + 1).cos() + (x.sin() + 1).cos(), 3),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_counts_of_nodes(case: tuple[Callable[[Tensor], Any], int]) -> None:
    fn, num_fewer = case
    x = torch.randn(2, 2)
    check(make_fx(fn)(x), num_fewer, x)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.rand_like(x) + torch.rand_like(x),
        lambda x: torch.randn(4) + torch.randn(4),
        lambda x: torch.bernoulli(x) + torch.bernoulli(x),
    ],
)
def test_random_ops_are_never_merged(fn: Callable[[Tensor], Tensor]) -> None:
    check(make_fx(fn)(torch.rand(2, 4)), 0)


def test_numbers_that_hash_alike_stay_apart() -> None:
    graphs: list[fx.GraphModule] = []

    def f(x: Tensor, size: int) -> Tensor:
        width = x.shape[-1]
        scale = (width - 1.0) / (size - 1.0)
        return scale * torch.clamp(x, 0, width - 1)

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(f, backend=keep, dynamic=True)(torch.rand(3, 100), 50)
    assert len(graphs) == 1
    check(graphs[0], 0)


def test_random_symbolic_traces() -> None:
    rng = random.Random(0)

    def f(x: Tensor) -> Tensor:
        values = [x]
        ops: list[Callable[[Tensor], Tensor]] = [
            torch.clone,
            torch.cos,
            torch.tanh,
            torch.nn.functional.gelu,
        ]
        for _ in range(100):
            values.append(rng.choice(ops)(rng.choice(values)))
        return values[-1]

    gm = fx.symbolic_trace(f)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    check(gm, None, torch.randn(2, 2))


def test_reads_around_a_write_stay_apart() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.clone()
        a = y.sum()
        b = y.sum()
        y.add_(1)
        return a + b + y.sum()

    check(make_fx(f)(torch.randn(3)), 1, torch.randn(3))


def test_copies_of_which_one_is_written_stay_apart() -> None:
    def f(x: Tensor) -> Tensor:
        a, b = x.clone(), x.clone()
        a.view(-1).add_(1)
        return a + b

    check(make_fx(f)(torch.randn(3)), 0, torch.randn(3))


def test_two_results_do_not_become_one_memory() -> None:
    gm = make_fx(lambda x: (x + 1, x + 1))(torch.randn(3))
    a, b = fx.GraphModule(gm, fx_graph_cse(gm.graph))(torch.randn(3))
    assert a.data_ptr() != b.data_ptr()


UNARY: tuple[Callable[..., Tensor], ...] = (
    torch.sin,
    torch.neg,
    torch.abs,
    torch.clone,
    torch.relu,
    torch.t,
)
BINARY: tuple[Callable[..., Tensor], ...] = (torch.add, torch.mul, torch.sub, torch.maximum)
STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99)), max_size=20)


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_random_graphs_keep_their_values(steps: list[tuple[int, int, int]]) -> None:
    def f(x: Tensor) -> list[Tensor]:
        values = [x]
        for op, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(UNARY[op](a) if op < len(UNARY) else BINARY[op - len(UNARY)](a, b))
        return values[-3:]

    x = torch.randn(3, 3)
    check(make_fx(f)(x), None, x)
