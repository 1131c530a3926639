"""Frozen inputs: what an inference graph computes only from parameters and buffers.

A graph is split in two: a *preparation*, which runs once and again when a parameter changes, and
the rest, which every call runs and to which the prepared values are inputs. Views move no memory,
so they stay in the rest; so does what shares memory with a result, which is the caller's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from perfuse.graph.aliases import Aliases, is_view
from perfuse.graph.copying import copy_node
from perfuse.graph.facts import attributes_of, is_pure, tensor_of
from perfuse.torch_compat.graphs import empty_like, module_of

# The mark of a placeholder whose value stays the same from call to call.
FROZEN = "perfuse_frozen"


def mark_frozen(gm: GraphModule, indices: Collection[int]) -> None:
    """Mark the inputs at these places, but for those that the graph writes to."""
    aliases = Aliases.of(gm.graph)
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if i in indices and tensor_of(node) is not None and not aliases.of_node(node).is_mutated:
            node.meta[FROZEN] = True


def frozen_nodes(gm: GraphModule) -> set[Node]:
    """The marked inputs, and what is computed from them and from constants alone."""
    if not any(FROZEN in node.meta for node in gm.graph.find_nodes(op="placeholder")):
        return set()
    aliases = Aliases.of(gm.graph)
    found: set[Node] = set()
    for node in gm.graph.nodes:
        shared = aliases.of_node(node)
        if shared.is_mutated or shared.num_outputs:
            continue
        if node.op == "placeholder":
            is_frozen = FROZEN in node.meta
        elif node.op == "get_attr":
            is_frozen = tensor_of(node) is not None
        else:
            is_frozen = is_pure(node) and found.issuperset(node.all_input_nodes)
        if is_frozen and _is_static(node):
            found.add(node)
    return found


def _is_static(node: Node) -> bool:
    """A tensor, or a call that returns several, of static sizes."""
    value = node.meta.get("val")
    parts = value if isinstance(value, (list, tuple)) else [value]
    return all(
        isinstance(t, torch.Tensor) and all(isinstance(n, int) for n in (*t.shape, *t.stride()))
        for t in parts
    )


@dataclass(frozen=True, slots=True)
class Split:
    """A graph in two: `rest` takes the inputs at `passed`, then what `prepare` returns."""

    prepare: GraphModule  # takes the inputs at `sources`
    rest: GraphModule
    sources: tuple[int, ...]
    passed: tuple[int, ...]


def split_frozen(gm: GraphModule) -> Split | None:
    """The graph without what its frozen inputs decide; None if that is nothing."""
    frozen = frozen_nodes(gm)
    prepared = list(dict.fromkeys(_frontier(gm, frozen)))
    if not prepared:
        return None
    inputs = gm.graph.find_nodes(op="placeholder")
    places = {node: i for i, node in enumerate(inputs)}
    needed = _ancestors_in_order(gm.graph, prepared)
    sources = tuple(places[n] for n in needed if n.op == "placeholder")
    rest = _rest(gm, set(needed), prepared)
    passed = tuple(places[n] for n in inputs if n.name in _names(rest))
    return Split(_preparation(gm, needed, prepared), rest, sources, passed)


def _frontier(gm: GraphModule, frozen: set[Node]) -> Iterator[Node]:
    """The frozen values that others read, each the base of the views through which they do."""
    for node in gm.graph.nodes:
        if node in frozen:
            continue
        for read in node.all_input_nodes:
            base = read
            while base in frozen and base.op == "call_function" and is_view(base):
                (base,) = base.all_input_nodes
            if base in frozen and base.op == "call_function" and _has_source(base):
                yield base


def _has_source(node: Node) -> bool:
    """Whether a value depends on any input: constants alone are folded, or cheap to make."""
    pending, seen = [node], {node}
    while pending:
        at = pending.pop()
        if at.op == "placeholder":
            return True
        fresh = [n for n in at.all_input_nodes if n not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return False


def _ancestors_in_order(graph: Graph, nodes: list[Node]) -> list[Node]:
    needed, pending = set(nodes), list(nodes)
    while pending:
        for read in pending.pop().all_input_nodes:
            if read not in needed:
                needed.add(read)
                pending.append(read)
    return [node for node in graph.nodes if node in needed]


def _preparation(gm: GraphModule, needed: list[Node], prepared: list[Node]) -> GraphModule:
    graph, copies = Graph(), dict[Node, Node]()
    for node in needed:
        copies[node] = copy_node(graph, node, copies)
    graph.output(tuple(copies[node] for node in prepared))
    return module_of(attributes_of(gm), graph)


def _rest(gm: GraphModule, needed: set[Node], prepared: list[Node]) -> GraphModule:
    """The graph with the prepared values as its last inputs."""
    graph, copies = empty_like(gm.graph), dict[Node, Node]()
    inputs = gm.graph.find_nodes(op="placeholder")
    for node in inputs:
        if node not in needed or any(_is_in_rest(user, needed) for user in node.users):
            copies[node] = copy_node(graph, node, copies)
    for i, node in enumerate(prepared):
        made = graph.placeholder(f"prepared_{i}")
        made.meta = {"val": node.meta["val"], FROZEN: True}
        copies[node] = made
    for node in gm.graph.nodes:
        if node not in copies and _is_in_rest(node, needed):
            copies[node] = copy_node(graph, node, copies)
    return module_of(attributes_of(gm), graph)


def _is_in_rest(node: Node, needed: set[Node]) -> bool:
    """Whether a node is computed in every call: also where a preparation needs it too."""
    if node.op == "placeholder":
        return False
    if node not in needed:
        return True
    return (is_view(node) or node.op == "get_attr") and any(
        _is_in_rest(user, needed) for user in node.users
    )


def _names(gm: GraphModule) -> set[str]:
    return {node.name for node in gm.graph.find_nodes(op="placeholder")}
