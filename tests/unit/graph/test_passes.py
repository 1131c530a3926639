"""The order of the passes: what is listed twice need not run twice on the same graph."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from perfuse.context import Context
from perfuse.graph.copying import GraphCopy, copy_but_for, copy_node
from perfuse.graph.passes import (
    ATEN_PASSES,
    DYNAMO_PASSES,
    JOINT_PASSES,
    Pass,
    PassRow,
    run_passes,
)
from perfuse.testing import fresh_cache
from tests.unit.graph.tracing import traced

aten = torch.ops.aten
CONTEXT = Context.default()
REPEATED = [run for run, count in Counter(run for _, run in ATEN_PASSES).items() if count > 1]


def twice_the_same(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x.exp()
    a, b = (x + y).relu() * 2, (x + y).relu() * 2
    y.add_(1)
    c = x + y
    return a.sum(0) + b.sum(0), torch.cat([c, x + y], dim=1), c.view(-1)[::2]


def example() -> GraphModule:
    return traced(twice_the_same, torch.randn(4, 6), torch.randn(4, 6))


@pytest.mark.parametrize("run", REPEATED, ids=lambda run: run.__name__)
def test_what_a_repeated_pass_made_is_settled(run: Pass) -> None:
    once = run(example(), CONTEXT)
    assert once is not run(example(), CONTEXT) and run(once, CONTEXT) is once


def test_passes_run_once_on_each_graph() -> None:
    seen: list[tuple[str, GraphModule]] = []

    def watched(run: Pass) -> Pass:
        def pass_and_tell(gm: GraphModule, context: Context) -> GraphModule:
            seen.append((run.__name__, gm))
            return run(gm, context)

        return pass_and_tell

    wrapped = {run: watched(run) for _, run in ATEN_PASSES}
    last = run_passes(example(), CONTEXT, [(name, wrapped[run]) for name, run in ATEN_PASSES])
    assert len({(name, id(gm)) for name, gm in seen}) == len(seen)
    for run in REPEATED:
        assert run(last, CONTEXT) is last


LEVELS = {"dynamo": DYNAMO_PASSES, "joint": JOINT_PASSES, "aten": ATEN_PASSES}


def cosine_for_sine(gm: GraphModule, context: Context) -> GraphModule:
    """A toy: the cosine wherever there is a sine, at any level."""

    def made(node: Node, new: GraphCopy) -> Node:
        copied = new.copy(node)
        copied.target = {torch.sin: torch.cos, aten.sin.default: aten.cos.default}.get(
            node.target, node.target
        )
        return copied

    return copy_but_for(gm, made)


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_adds_a_pass(level: str) -> None:
    rows: list[PassRow] = LEVELS[level]
    row = ("toy", cosine_for_sine)
    rows.append(row)
    torch._dynamo.reset()
    try:
        x = torch.linspace(-1, 1, 8).requires_grad_()
        with fresh_cache():
            result = torch.compile(lambda x: torch.sin(x), backend="perfuse")(x)
        result.sum().backward()
    finally:
        rows.remove(row)
        torch._dynamo.reset()
    torch.testing.assert_close(result, torch.cos(x))
    # Only Dynamo's graph is differentiated after the pass.
    gradient = -torch.sin(x) if level == "dynamo" else torch.cos(x)
    torch.testing.assert_close(x.grad, gradient.detach())


def test_a_copy_is_as_the_graph_itself_makes_it() -> None:
    source = example().graph
    ours, theirs = Graph(), Graph()
    copies: dict[Node, Node] = {}
    other: dict[Node, Node] = {}
    for node in source.nodes:
        copies[node] = copy_node(ours, node, copies)
        other[node] = theirs.node_copy(node, lambda n: other[n])
    assert str(ours) == str(theirs)
    for node, made in copies.items():
        assert made.meta == node.meta and made.meta is not node.meta
        assert _facts(made) == _facts(other[node])


def _facts(node: Node) -> tuple[Any, ...]:
    users = sorted(user.name for user in node.users)
    inputs = [source.name for source in node.all_input_nodes]
    return node.op, node.target, node.name, node.type, inputs, users
