"""Chains of thousands of small steps: no recursion limit, no more than linear time.

The long ones are built as ATen graphs by hand: capturing 5,000 steps takes PyTorch a minute and a
half, of which nothing is tested here.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from perfuse.config import Settings
from perfuse.context import Context
from perfuse.pipeline import compile_graph
from tests.behaviour.row import Behaviour, randn
from tests.harness.compare import assert_as_good_as_eager

aten = torch.ops.aten
NUM_STEPS = 3_000
FUNCTIONS = [
    getattr(aten, name).default
    for name in ("sin", "exp", "tanh", "sigmoid", "cos", "log1p", "erf", "neg", "expm1")
]
LIMIT_S = 6.0  # of processor time, Perfuse's and the compiler's: others may use this machine too


class Chain:
    """An ATen graph under construction, every value with its fake tensor.

    Calls of one op on equal sizes share a fake tensor: PyTorch takes two minutes to make 5,000
    steps of them on symbolic sizes.
    """

    def __init__(self, inputs: list[Tensor], *, dynamic: bool) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.graph = Graph()
        self.known: dict[Hashable, Any] = {}
        self.inputs = [self._input(i, x, dynamic) for i, x in enumerate(inputs)]

    def _input(self, number: int, x: Tensor, dynamic: bool) -> Node:
        node = self.graph.placeholder(f"x{number}")
        if dynamic:
            for axis in range(x.ndim):
                torch._dynamo.mark_dynamic(x, axis)
        node.meta["val"] = self.mode.from_tensor(x, static_shapes=None if dynamic else True)
        return node

    def __call__(self, op: Any, *args: Any) -> Node:
        node = self.graph.call_function(op, args)
        values = [a.meta["val"] if isinstance(a, Node) else a for a in node.args]
        key = (op, *(str(v.shape) for v in values if isinstance(v, Tensor)))
        if key not in self.known:
            with self.mode:
                self.known[key] = op(*values)
        node.meta["val"] = self.known[key]
        return node

    def module(self, result: Node) -> GraphModule:
        self.graph.output((result,))
        return GraphModule(torch.nn.Module(), self.graph)


def recurrence(chain: Chain, num_steps: int) -> Node:
    h, u, decay = chain.inputs
    for t in range(num_steps):
        h = chain(
            aten.add.Tensor, chain(aten.mul.Tensor, h, decay), chain(aten.select.int, u, 1, t)
        )
    return h


def constants_only(chain: Chain, num_steps: int) -> Node:
    h = chain.inputs[0]
    for _ in range(num_steps):
        h = chain(aten.add.Tensor, chain(aten.mul.Tensor, h, 0.5), 0.25)
    return h


def other_constants(chain: Chain, num_steps: int) -> Node:
    h = chain.inputs[0]
    for t in range(num_steps):
        h = chain(aten.add.Tensor, chain(aten.mul.Tensor, h, 0.5), float(t))
    return h


def library_functions(chain: Chain, num_steps: int) -> Node:
    h = chain.inputs[0]
    for _ in range(num_steps // 2):
        h = chain(aten.sin.default, chain(aten.mul.Tensor, h, 1.5))
    return h


def other_functions(chain: Chain, num_steps: int) -> Node:
    h = chain.inputs[0]
    for t in range(num_steps):
        h = chain(FUNCTIONS[t % len(FUNCTIONS)], h)
    return h


def choices(chain: Chain, num_steps: int) -> Node:
    """Every value is read twice, so each is a loop of its own."""
    h, _, low = chain.inputs
    for t in range(num_steps // 3):
        h = chain(aten.where.self, chain(aten.gt.Tensor, h, low), h, low)
        h = chain(aten.clamp.default, h, -1.0 - t, 0.5 + 1 / (t + 1))
    return h


def spent_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


CHAINS = [
    (recurrence, True),
    (constants_only, False),
    (other_constants, True),
    (library_functions, True),
    (other_functions, False),
    (choices, False),
    # Near the limit where both threads of each core are busy: for a quiet machine.
    pytest.param(choices, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("build", "dynamic"), CHAINS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_compiles_in_linear_time(build: Callable[[Chain, int], Node], dynamic: bool) -> None:
    inputs = [randn(48), randn(48, NUM_STEPS), torch.rand(48) * 0.9]
    module = Chain(inputs, dynamic=dynamic)
    graph = module.module(build(module, NUM_STEPS))
    context = Context.default(Settings().with_overrides({"cache": {"enabled": False}}))
    began = spent_s()
    compiled = compile_graph(graph, context)
    spent = spent_s() - began
    got = compiled.call(list(inputs))[0]
    wide = [x.double() for x in inputs]
    assert_as_good_as_eager(got, graph(*inputs)[0], graph(*wide)[0])
    assert spent < LIMIT_S, f"{spent:.1f} s: {compiled.seconds}"


def recurrent(h: Tensor, u: Tensor, decay: Tensor) -> Tensor:
    for t in range(u.shape[1]):
        h = h * decay + u[:, t]
    return h


def scalar_loop(x: Tensor) -> Tensor:
    total = x.sum()
    for i in range(300):
        total = total * 0.5 + i
    return total


def cumulative_products(x: Tensor) -> Tensor:
    rows = [x[0]]
    for i in range(1, x.shape[0]):
        rows.append(rows[-1] * x[i])
    return torch.stack(rows)


def nested_slices(x: Tensor) -> Tensor:
    for _ in range(120):
        x = x[1:] + 1
    return x


def views_of_views(x: Tensor) -> Tensor:
    for _ in range(120):
        x = x[1:].unsqueeze(0).squeeze(0)
    return x * 2


def growing_cat(x: Tensor) -> Tensor:
    total = x[:1]
    for i in range(1, 40):
        total = torch.cat([total, x[i : i + 1] + total[-1:]])
    return total


def scatters(x: Tensor, places: Tensor) -> Tensor:
    for _ in range(40):
        x = torch.index_add(x, 0, places, x[: places.shape[0]] * 0.5)
    return x


def pointers_followed(x: Tensor, table: Tensor) -> Tensor:
    at = table[:8]
    for _ in range(60):
        at = table[at]
    return x[at]


ROWS = (
    Behaviour("recurrence", recurrent, lambda: [randn(8), randn(8, 300), randn(8) * 0.1]),
    Behaviour("scalar_loop", scalar_loop, lambda: [randn(5)]),
    Behaviour("cumulative_products", cumulative_products, lambda: [randn(60, 4, grad=True)]),
    Behaviour("nested_slices", nested_slices, lambda: [randn(150)]),
    Behaviour("views_of_views", views_of_views, lambda: [randn(150)]),
    Behaviour("growing_cat", growing_cat, lambda: [randn(40, 3)]),
    Behaviour("scatters", scatters, lambda: [randn(9, 3), torch.tensor([1, 3, 3])]),
    Behaviour("pointers", pointers_followed, lambda: [randn(16), torch.arange(16).flip(0)]),
    Behaviour(
        "training",
        lambda h, u, d: recurrent(h, u, d).sum(),
        lambda: [randn(8, grad=True), randn(8, 150, grad=True), (randn(8) * 0.1).requires_grad_()],
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_long(row: Behaviour) -> None:
    row.check()
