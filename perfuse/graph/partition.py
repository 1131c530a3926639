"""The joint graph in two: a forward, and a backward that recomputes what is cheap.

`saving/` decides which values cross; this file cuts along them in the form AOTAutograd expects:

    forward:   primals                              -> results, saved tensors, saved others, sizes
    backward:  sizes, saved tensors, saved others, tangents, backward seeds, state -> gradients
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from perfuse.config import Settings
from perfuse.graph.cse import eliminate_common_subexpressions
from perfuse.graph.facts import GIVEN_UP, has_effects, is_sym, output_leaves, output_node, tensor_of
from perfuse.graph.saving.choose import choose_saved
from perfuse.graph.saving.policy import SavePolicy
from perfuse.graph.saving.roles import Roles
from perfuse.graph.seed_random import seed_random_values
from perfuse.torch_compat import (
    free_symbols_of,
    is_backward_state,
    module_of,
    mutated_descriptions,
    saved_output_description,
    sym_expression,
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
            inputs._list_for(node).append(node)
            if is_backward_state(node):
                inputs.states.append(node)
        return inputs

    def _list_for(self, node: Node) -> list[Node]:
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
    """What crosses from forward to backward, in AOTAutograd's groups."""

    tensors: list[Node]
    others: list[Node]
    sizes: list[Node]

    def num_unchecked(self) -> int:
        return sum(bool(node.meta.get(UNCHECKED)) for node in self.tensors)


def partition_joint(
    joint: GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    settings: Settings | None = None,
    **kwargs: Any,
) -> tuple[GraphModule, GraphModule]:
    """The joint graph's forward and backward: AOTAutograd's `partition_fn`."""
    settings = settings or Settings()
    joint = _each_value_once(joint)
    if not settings.fallback_random:
        joint = seed_random_values(joint, _nodes(output_leaves(joint.graph)[:num_fwd_outputs]))
    graph = joint.graph
    inputs = Inputs.of(graph)
    results = output_leaves(graph)
    roles = Roles.of(
        graph,
        tangents={*inputs.tangents, *inputs.backward_seeds, *inputs.states},
        results=_nodes(results[:num_fwd_outputs]),
        gradients=_nodes(results[num_fwd_outputs:]),
        overwritten=_overwritten(graph, inputs),
    )
    saved = _grouped(choose_saved(graph, roles, policy_of(settings)), inputs)
    return (
        module_of(joint, _forward(graph, roles, inputs, saved, num_fwd_outputs)),
        module_of(joint, _backward(graph, roles, inputs, saved, num_fwd_outputs)),
    )


def _each_value_once(joint: GraphModule) -> GraphModule:
    """What both halves compute is one value, so that it can be kept instead."""
    is_checkpointed = any("recompute" in node.meta for node in joint.graph.nodes)
    # A value of two checkpointed regions would have to be kept for the second one.
    return joint if is_checkpointed else eliminate_common_subexpressions(joint)


def policy_of(settings: Settings) -> SavePolicy:
    """What the settings say about computing values again."""
    return SavePolicy(level=settings.recompute_level)


def _overwritten(graph: Graph, inputs: Inputs) -> list[Node]:
    """Primals whose new value is among the results: the caller copies it back after the forward."""
    names = mutated_descriptions(_descriptions(graph) or [])
    return [node for node in inputs.primals if node.meta.get("desc") in names] if names else []


def _nodes(values: list[Any]) -> list[Node]:
    return [value for value in values if isinstance(value, Node)]


def _grouped(chosen: list[Node], inputs: Inputs) -> Saved:
    """Tensors (those without version checks last), others, and all sizes that they speak of."""
    tensors = [n for n in chosen if tensor_of(n) is not None]
    tensors.sort(key=lambda n: bool(n.meta.get(UNCHECKED)))  # stable
    sizes = [n for n in chosen if is_sym(n)]
    others = [n for n in chosen if not is_sym(n) and tensor_of(n) is None]
    others = [n for n in others if n not in inputs.states]
    return Saved(tensors, others, _with_bindings(sizes, [*tensors, *inputs.tangents], inputs))


def _symbol_of(node: Node) -> Any | None:
    """The symbol that a size placeholder is the value of."""
    value = node.meta.get("val")
    if not isinstance(value, torch.SymInt):
        return None
    expression = sym_expression(value)
    return expression if getattr(expression, "is_Symbol", False) else None


def _with_bindings(sizes: list[Node], tensors: list[Node], inputs: Inputs) -> list[Node]:
    """`sizes`, with the placeholder of each symbol in a shape of the backward's inputs first."""
    bindings = {_symbol_of(node): node for node in inputs.primals if _symbol_of(node) is not None}
    if not bindings:
        return sizes
    bound = [node for node in sizes if _symbol_of(node) is not None]
    needed: list[Any] = []
    for node in [*sizes, *tensors]:
        found = free_symbols_of(node.meta["val"])
        needed.extend(sorted(found, key=str))
    extra = [bindings[symbol] for symbol in needed if symbol in bindings]
    return list(dict.fromkeys([*bound, *extra, *sizes]))


class _Extract:
    """Builds one half: placeholders first, then whatever its results need, in order of need."""

    def __init__(self, placeholders: list[Node]) -> None:
        self.graph = Graph()
        self._copy: dict[Node, Node] = {}
        for node in placeholders:
            copied = self.graph.placeholder(node.name)
            copied.meta = dict(node.meta)
            self._copy[node] = copied

    def give_up(self, placeholder: Node) -> None:
        """Mark an input as one that nobody needs afterwards."""
        self._copy[placeholder].meta[GIVEN_UP] = True

    def need(self, node: Node) -> None:
        """Emit `node` and, before it, everything it needs that is not there yet."""
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [n for n in top.all_input_nodes if n not in self._copy]
            if top in self._copy or not missing:
                stack.pop()
                self._emit(top)
            else:
                stack.extend(reversed(missing))

    def _emit(self, node: Node) -> None:
        if node not in self._copy:
            assert node.op != "placeholder", f"{node} is not an input of this half of the graph"
            self._copy[node] = self.graph.node_copy(node, lambda n: self._copy[n])

    def finish(self, values: list[Any], descriptions: list[Any] | None) -> Graph:
        for node in _nodes(values):
            self.need(node)
        copies = [self._copy[v] if isinstance(v, Node) else v for v in values]
        out = self.graph.output(tuple(copies))
        if descriptions is not None:
            out.meta["desc"] = descriptions
        return self.graph


def _descriptions(graph: Graph) -> list[Any] | None:
    """AOTAutograd's names for the joint graph's results, where it gives them."""
    found = output_node(graph).meta.get("desc")
    return None if found is None else list(found)


def _forward(
    graph: Graph, roles: Roles, inputs: Inputs, saved: Saved, num_fwd_outputs: int
) -> Graph:
    extract = _Extract([*inputs.primals, *inputs.forward_seeds])
    for node in graph.nodes:
        # In the order of the program: a write must stay behind the reads that precede it.
        if node in roles.forward and node.op == "call_function":
            extract.need(node)
    kept = [*saved.tensors, *saved.others, *saved.sizes]
    descriptions = _descriptions(graph)
    if descriptions is not None:
        first_unchecked = len(saved.tensors) - saved.num_unchecked()
        descriptions = descriptions[:num_fwd_outputs] + [
            saved_output_description(i, first_unchecked <= i < len(saved.tensors))
            for i in range(len(kept))
        ]
    return extract.finish([*output_leaves(graph)[:num_fwd_outputs], *kept], descriptions)


def _backward(
    graph: Graph, roles: Roles, inputs: Inputs, saved: Saved, num_fwd_outputs: int
) -> Graph:
    others = [*inputs.tangents, *inputs.backward_seeds, *inputs.states]
    extract = _Extract([*saved.sizes, *saved.tensors, *saved.others, *others])
    for node in [*saved.tensors, *inputs.tangents]:
        if node not in inputs.primals:
            extract.give_up(node)
    for node in graph.nodes:
        # Recomputed values come just before their first reader: they live no longer than needed.
        if node in roles.backward and (node in roles.needed_backward or has_effects(node)):
            extract.need(node)
    descriptions = _descriptions(graph)
    half = None if descriptions is None else descriptions[num_fwd_outputs:]
    result = extract.finish(output_leaves(graph)[num_fwd_outputs:], half)
    for node in result.nodes:
        if node.op in ("call_function", "get_attr"):
            node.meta["autograd_backward"] = True
    return result
