"""The joint graph in two: a forward, and a backward that recomputes what is cheap.

`saving/` decides which values cross; this file cuts along them in the form AOTAutograd expects:

    forward:   primals                              -> results, saved tensors, saved others, sizes
    backward:  sizes, saved tensors, saved others, tangents, backward seeds, state -> gradients
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from perfuse.config import Settings
from perfuse.context import Context
from perfuse.graph.copying import copy_node
from perfuse.graph.facts import (
    DONATED,
    NUM_RESULTS,
    RECOMPUTED,
    ROUNDED,
    is_sym,
    output_leaves,
    output_node,
    output_nodes,
    results_of,
    tensor_of,
)
from perfuse.graph.passes import JOINT_PASSES, run_passes
from perfuse.graph.saving.choose import choose_saved
from perfuse.graph.saving.roles import Roles
from perfuse.graph.saving.roundings import rounded_alike
from perfuse.graph.saving.unread_results import mark_unread_results
from perfuse.torch_compat.autograd import (
    is_backward_state,
    mutated_descriptions,
    saved_output_description,
)
from perfuse.torch_compat.graphs import module_of
from perfuse.torch_compat.sizes import (
    free_symbols_of,
    is_from_data,
    sym_expression,
    sym_leaves,
)

UNCHECKED = "saved_tensor_with_no_vc_check"  # AOTAutograd's mark on a value stashed on `ctx`


@dataclass(frozen=True, slots=True)
class Inputs:
    """The joint graph's placeholders by what they are for."""

    primals: list[Node]
    tangents: list[Node]
    forward_seeds: list[Node]
    backward_seeds: list[Node]
    states: list[Node]

    @staticmethod
    def of(graph: Graph) -> "Inputs":
        inputs = Inputs([], [], [], [], [])
        for node in graph.find_nodes(op="placeholder"):
            inputs.list_for(node).append(node)
            if is_backward_state(node):
                inputs.states.append(node)
        return inputs

    def list_for(self, node: Node) -> list[Node]:
        name = str(node.target)
        if "tangents" in name:
            return self.tangents
        if "bwd_seed" in name or "bwd_base_offset" in name:
            return self.backward_seeds
        if "fwd_seed" in name or "fwd_base_offset" in name:
            return self.forward_seeds
        return self.primals


@dataclass(frozen=True, slots=True)
class Saved:
    """The values that cross from forward to backward, in AOTAutograd's groups."""

    tensors: list[Node]
    others: list[Node]
    sizes: list[Node]


@dataclass(frozen=True, slots=True)
class Cut:
    """A joint graph split in two: which values are saved and which recomputed."""

    forward: GraphModule
    backward: GraphModule
    num_results: int  # the first outputs of the forward, which are the caller's
    saved: tuple[Node, ...]  # of the joint graph
    recomputed: tuple[Node, ...]  # calls of the forward that the backward repeats

    def links(self) -> list[tuple[int, int]]:
        """For each saved value its place among the forward's outputs and the backward's inputs."""
        placeholders = self.backward.graph.find_nodes(op="placeholder")
        places = {node.name: i for i, node in enumerate(placeholders)}
        outputs = list(enumerate(output_leaves(self.forward.graph)))[self.num_results :]
        named = [(i, node.name) for i, node in outputs if isinstance(node, Node)]
        return [(i, places[name]) for i, name in named if name in places]


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint graph, with the roles of its nodes: what can be cut in two."""

    module: GraphModule
    inputs: Inputs
    roles: Roles
    num_results: int

    @staticmethod
    def of(module: GraphModule, num_results: int, context: Context) -> "Joint":
        output_node(module.graph).meta[NUM_RESULTS] = num_results
        mark_unread_results(module.graph)
        module = run_passes(module, context, JOINT_PASSES)
        graph, inputs = module.graph, Inputs.of(module.graph)
        roles = Roles.of(
            graph,
            tangents={*inputs.tangents, *inputs.backward_seeds, *inputs.states},
            results=results_of(graph),
            gradients=output_nodes(graph, start=num_results),
            overwritten=_overwritten(graph, inputs),
        )
        return Joint(module, inputs, roles, num_results)

    def cut(self, chosen: list[Node], wanted: Iterable[Node] = ()) -> Cut:
        """The two halves, with the chosen values crossing between them.

        `wanted` are those that the backward is written for: those of them that are not chosen are
        recomputed before they are read.
        """
        saved = _grouped(chosen, self)
        forward = _forward(self, saved)
        backward = _backward(self, saved, frozenset(wanted) - {*chosen})
        copied = backward.copied()
        in_both = forward.copied() & copied
        for half in (forward, backward):
            half.round_alike(rounded_alike([*saved.tensors, *in_both]) & in_both)
        again = (n for n in self.module.graph.nodes if n in copied and n in self.roles.forward)
        return Cut(
            module_of(self.module, forward.graph),
            module_of(self.module, backward.graph),
            self.num_results,
            tuple(saved.tensors),
            tuple(n for n in again if n.op == "call_function" and n not in chosen),
        )


def plain_cut(joint: Joint, settings: Settings) -> Cut:
    """The cut without a budget."""
    return joint.cut(choose_saved(joint.module.graph, joint.roles, settings.recompute_level))


def _overwritten(graph: Graph, inputs: Inputs) -> list[Node]:
    """Primals whose new value is among the results: the caller copies it back after the forward."""
    names = mutated_descriptions(_descriptions(graph) or [])
    return [node for node in inputs.primals if node.meta.get("desc") in names] if names else []


def _grouped(chosen: list[Node], joint: Joint) -> Saved:
    """Tensors (those without version checks last), others, and all their sizes."""
    inputs = joint.inputs
    tensors = [n for n in chosen if tensor_of(n) is not None]
    tensors.sort(key=lambda n: bool(n.meta.get(UNCHECKED)))  # stable
    sizes = [n for n in chosen if is_sym(n)]
    others = [n for n in chosen if not is_sym(n) and tensor_of(n) is None]
    others = [n for n in others if n not in inputs.states]
    return Saved(tensors, others, _with_bindings(sizes, [*tensors, *inputs.tangents], joint))


def _symbol_of(node: Node) -> Any | None:
    """The symbol that a node is the value of."""
    value = node.meta.get("val")
    if not isinstance(value, torch.SymInt):
        return None
    expression = sym_expression(value)
    return expression if getattr(expression, "is_Symbol", False) else None


def _with_bindings(sizes: list[Node], tensors: list[Node], joint: Joint) -> list[Node]:
    """`sizes`, with the node of each symbol in a shape of the backward's inputs first."""
    primals = joint.inputs.primals
    bindings = {_symbol_of(node): node for node in primals if _symbol_of(node) is not None}
    bindings |= _bound_by_data(tensors, joint)
    if not bindings:
        return sizes
    bound = [node for node in sizes if _symbol_of(node) is not None]
    symbols = (sorted(free_symbols_of(n.meta["val"]), key=str) for n in [*sizes, *tensors])
    extra = [bindings[symbol] for found in symbols for symbol in found if symbol in bindings]
    return list(dict.fromkeys([*bound, *extra, *sizes]))


def _bound_by_data(tensors: list[Node], joint: Joint) -> dict[Any, Node]:
    """Nodes of the forward that are sizes from data, which no axis of these tensors has alone."""
    axes = {sym_expression(n) for t in tensors for n in sym_leaves([t.meta["val"]])}
    found: dict[Any, Node] = {}
    for node in joint.module.graph.nodes:
        symbol = _symbol_of(node) if node in joint.roles.forward else None
        if symbol is not None and is_from_data(symbol) and symbol not in axes:
            found.setdefault(symbol, node)
    return found


_Key = tuple[Node, bool]  # a node, and whether it is meant in the second forward


class _Extract:
    """Builds one half: placeholders first, then whatever its results need, in order of need.

    Values in `remade` would be saved if memory allowed. A *second forward* computes them, and it is
    read for nothing else: what is cheap to derive from them is rederived in the backward, so
    that it does not wait in memory from the second forward on.
    """

    def __init__(self, placeholders: list[Node], remade: frozenset[Node] = frozenset()) -> None:
        self.graph = Graph()
        self._remade = remade
        self._given: dict[Node, Node] = {}
        self._copy: dict[_Key, Node] = {}
        for node in placeholders:
            copied = self.graph.placeholder(node.name)
            copied.meta = dict(node.meta)
            self._given[node] = copied

    def donate(self, placeholder: Node) -> None:
        self._given[placeholder].meta[DONATED] = True

    def need(self, node: Node) -> None:
        """Emit `node` and, before it, everything it needs that is not there yet."""
        stack = [(node, node in self._remade)]
        while stack:
            top = stack[-1]
            sources = [] if self._is_there(top) else self._inputs(top)
            missing = [source for source in sources if not self._is_there(source)]
            if missing:
                stack.extend(reversed(missing))
            else:
                stack.pop()
                self._emit(top)

    def _is_there(self, key: _Key) -> bool:
        return key[0] in self._given or key in self._copy

    def _inputs(self, key: _Key) -> list[_Key]:
        node, is_second = key
        return [(n, is_second or n in self._remade) for n in node.all_input_nodes]

    def _emit(self, key: _Key) -> None:
        if self._is_there(key):
            return
        node, is_second = key
        assert node.op != "placeholder", f"{node} is not an input of this half of the graph"
        copies = {source[0]: self._of(source) for source in self._inputs(key)}
        made = copy_node(self.graph, node, copies)
        if is_second and node.op == "call_function":
            made.meta[RECOMPUTED] = True
        self._copy[key] = made

    def _of(self, key: _Key) -> Node:
        return self._given.get(key[0]) or self._copy[key]

    def copied(self) -> set[Node]:
        """The nodes computed here, once or twice."""
        return {node for node, _ in self._copy}

    def round_alike(self, nodes: set[Node]) -> None:
        """Mark these values as rounded: the other half computes them too."""
        for (node, _), copied in self._copy.items():
            if node in nodes:
                copied.meta[ROUNDED] = True

    def finish(self, values: list[Any], descriptions: list[Any] | None) -> None:
        for node in values:
            if isinstance(node, Node):
                self.need(node)
        copies = [self._of((v, v in self._remade)) if isinstance(v, Node) else v for v in values]
        out = self.graph.output(tuple(copies))
        if descriptions is not None:
            out.meta["desc"] = descriptions


def _descriptions(graph: Graph) -> list[Any] | None:
    """AOTAutograd's names for the joint graph's results, where it gives them."""
    found = output_node(graph).meta.get("desc")
    return None if found is None else list(found)


def _forward(joint: Joint, saved: Saved) -> _Extract:
    graph, num_results = joint.module.graph, joint.num_results
    extract = _Extract([*joint.inputs.primals, *joint.inputs.forward_seeds])
    for node in graph.nodes:
        # In program order: a write must stay after the reads that precede it.
        if node in joint.roles.forward and node.op == "call_function":
            extract.need(node)
    kept = [*saved.tensors, *saved.others, *saved.sizes]
    descriptions = _descriptions(graph)
    if descriptions is not None:
        first_unchecked = sum(not node.meta.get(UNCHECKED) for node in saved.tensors)
        descriptions = descriptions[:num_results] + [
            saved_output_description(i, first_unchecked <= i < len(saved.tensors))
            for i in range(len(kept))
        ]
    extract.finish([*output_leaves(graph)[:num_results], *kept], descriptions)
    return extract


def _backward(joint: Joint, saved: Saved, remade: frozenset[Node]) -> _Extract:
    graph, inputs, num_results = joint.module.graph, joint.inputs, joint.num_results
    others = [*inputs.tangents, *inputs.backward_seeds, *inputs.states]
    extract = _Extract([*saved.sizes, *saved.tensors, *saved.others, *others], remade)
    for node in {*saved.tensors, *inputs.tangents} - {*inputs.primals}:
        extract.donate(node)
    for node in graph.nodes:
        # Recomputed values come just before their first reader: they live no longer than needed.
        if node in joint.roles.backward:
            extract.need(node)
    descriptions = _descriptions(graph)
    half = None if descriptions is None else descriptions[num_results:]
    extract.finish(output_leaves(graph)[num_results:], half)
    for node in extract.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            node.meta["autograd_backward"] = True
    return extract
