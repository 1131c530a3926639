"""The order of the passes: what is listed twice need not run twice on the same graph."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from perfuse.graph.copying import copy_node
from perfuse.graph.passes import PASSES, Pass, run_passes
from tests.unit.graph.tracing import traced

REPEATED = [run for run, count in Counter(run for _, run in PASSES).items() if count > 1]


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
    once = run(example())
    assert once is not run(example()) and run(once) is once


def test_passes_run_once_on_each_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, GraphModule]] = []

    def watched(run: Pass) -> Pass:
        def pass_and_tell(gm: GraphModule) -> GraphModule:
            seen.append((run.__name__, gm))
            return run(gm)

        return pass_and_tell

    wrapped = {run: watched(run) for _, run in PASSES}
    monkeypatch.setattr("perfuse.graph.passes.PASSES", tuple((n, wrapped[r]) for n, r in PASSES))
    last = run_passes(example())
    assert len({(name, id(gm)) for name, gm in seen}) == len(seen)
    for run in REPEATED:
        assert run(last) is last


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
