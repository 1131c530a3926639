"""Where each node of a joint graph belongs: forward, backward, or either."""

from dataclasses import dataclass

from torch.fx import Graph, Node

from perfuse.graph.facts import EARLY, ancestors, has_effects, is_part, is_sym
from perfuse.graph.saving.costs import is_cheap


@dataclass(frozen=True, slots=True)
class Roles:
    """Where each node of a joint graph belongs."""

    forward: set[Node]  # needed for the forward's results, or an effect of the forward
    backward: set[Node]  # must run in the backward: needed for its gradients or effects
    results: list[Node]  # what the forward returns to the caller
    gradients: list[Node]
    overwritten: list[Node]  # primals that get a new value before the backward runs

    @staticmethod
    def of(
        graph: Graph,
        *,
        tangents: set[Node],
        results: list[Node],
        gradients: list[Node],
        overwritten: list[Node],
    ) -> "Roles":
        after = _dependent(graph, tangents)
        effects = [n for n in graph.nodes if has_effects(n)]
        early = [n for n in effects if n not in after and not is_tagged_backward(n)]
        early += [n for n in graph.nodes if n.meta.get(EARLY)]
        late = [n for n in effects if n in after or is_tagged_backward(n)]
        forward = _with_getitems(graph, ancestors([*results, *early]))
        needed = ancestors([*gradients, *late])
        # Cheap values could run on either side.
        fixed = (n for n in needed - forward if not is_sym(n) and not is_cheap(n))
        own = {n for n in fixed if n.op == "call_function"}
        return Roles(forward, (needed & after) | own, results, gradients, overwritten)


def is_tagged_backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _dependent(graph: Graph, sources: set[Node]) -> set[Node]:
    found = set(sources)
    for node in graph.nodes:
        if node.op != "output" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _with_getitems(graph: Graph, nodes: set[Node]) -> set[Node]:
    """A tuple cannot be saved, its parts can: they belong where the tuple is computed."""
    for node in graph.nodes:
        if is_part(node) and node.all_input_nodes[0] in nodes:
            nodes.add(node)
    return nodes
