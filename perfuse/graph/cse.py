"""Common subexpression elimination.

One forward sweep reaches the fixed point, because a node's key is made of the representatives of
its inputs. Keys carry the type of every constant: 1, 1.0 and True are equal in Python and are
three different arguments here.
"""

from collections.abc import Hashable
from typing import Any

from torch.fx import Graph, GraphModule, Node

from perfuse.graph.aliases import Aliases, mutated_inputs
from perfuse.graph.copying import copied_graph
from perfuse.graph.facts import RECOMPUTED, has_effects, is_known, is_pure
from perfuse.torch_compat.graphs import module_of
from perfuse.torch_compat.sizes import free_symbols_of, is_from_data, sym_leaves


class _Opaque(Exception):
    """An argument that cannot be compared: a node that has one is never merged."""


def eliminate_common_subexpressions(gm: GraphModule) -> GraphModule:
    """The pass: the module with every pure expression computed once."""
    kept = _Sweep(gm.graph).run()
    if all(node is first for node, first in kept.items()):
        return gm
    return module_of(gm, _copied(gm.graph, kept))


def share_between_halves(joint: GraphModule) -> GraphModule:
    """The pass on joint graphs: what both halves compute is one value, so that it can be saved."""
    is_checkpointed = any("recompute" in node.meta for node in joint.graph.nodes)
    # A value of two checkpointed regions would have to be saved for the second one.
    return joint if is_checkpointed else eliminate_common_subexpressions(joint)


def fx_graph_cse(graph: Graph) -> Graph:
    """A new graph in which every pure expression of `graph` is computed once."""
    return _copied(graph, _Sweep(graph).run())


def _copied(graph: Graph, kept: dict[Node, Node]) -> Graph:
    """The graph with each node read where its first equal is."""
    return copied_graph(
        graph, lambda node, new: new.copy(node) if kept[node] is node else new.of[kept[node]]
    )


def _sizes_from_data(node: Node) -> set[Any]:
    """The data-dependent symbols in a node's value."""
    leaves = sym_leaves([node.meta.get("val")])
    return {symbol for leaf in leaves for symbol in free_symbols_of(leaf) if is_from_data(symbol)}


class _Sweep:
    """One walk over a graph, with the expressions seen so far."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._aliases = Aliases.of(graph)
        self._kept: dict[Node, Node] = {}
        self._seen: dict[Hashable, Node] = {}
        self._num_writes: dict[Node, int] = {}  # by class of aliases
        self._num_unknown = 0  # calls that may have written anywhere

    def run(self) -> dict[Node, Node]:
        """Every node, and the node that replaces it."""
        for node in self._graph.nodes:
            self._kept[node] = self._merge(node)
            self._note_writes(node)
        return self._kept

    def _merge(self, node: Node) -> Node:
        """The earlier node that computes the same value, or `node` itself."""
        if not (node.op == "get_attr" or is_pure(node)):
            return node
        if self._aliases.of_node(node).is_mutated:
            return node
        key = self._key(node)
        if key is None:
            return node
        first = self._seen.setdefault(key, node)
        if first is node or not self._aliases.can_stand_for(first, node):
            return node
        if not _sizes_from_data(node) <= _sizes_from_data(first):
            return node  # sizes after it are by symbols that nothing else would give
        self._aliases.join(node, first)
        return first

    def _note_writes(self, node: Node) -> None:
        if has_effects(node) and not is_known(node):
            self._num_unknown += 1
        for written in mutated_inputs(node):
            root = self._aliases.root(written)
            self._num_writes[root] = self._num_writes.get(root, 0) + 1

    def _key(self, node: Node) -> Hashable | None:
        try:
            args = self._freeze(node.args)
            kwargs = self._freeze(node.kwargs)
        except _Opaque:
            return None
        reads = self._writes_before(node) if self._num_writes else ()
        is_recomputed = bool(node.meta.get(RECOMPUTED))
        return (node.op, node.target, args, kwargs, reads, self._num_unknown, is_recomputed)

    def _writes_before(self, node: Node) -> tuple[int, ...]:
        """How often the inputs of `node` were written to: between writes a value is the same."""
        counts = [self._num_writes.get(self._aliases.root(n), 0) for n in node.all_input_nodes]
        return tuple(counts) if any(counts) else ()

    def _freeze(self, value: Any) -> Hashable:
        """`value` as a key in which only equal arguments are equal."""
        if isinstance(value, Node):
            return (Node, self._kept[value])
        if isinstance(value, (list, tuple)):
            kind: type = list if isinstance(value, list) else tuple
            return self._freeze_all(kind, value)
        if isinstance(value, dict):
            return self._freeze_all(dict, [part for k in sorted(value) for part in (k, value[k])])
        if isinstance(value, slice):
            return self._freeze_all(slice, (value.start, value.stop, value.step))
        return _freeze_constant(value)

    def _freeze_all(self, kind: type, items: Any) -> Hashable:
        return (kind, tuple([self._freeze(item) for item in items]))


def _freeze_constant(value: Any) -> Hashable:
    if isinstance(value, float):
        return (float, value.hex())  # -0.0 is not 0.0, and a NaN is itself
    if isinstance(value, complex):
        return (complex, value.real.hex(), value.imag.hex())
    try:
        hash(value)
    except TypeError as error:
        raise _Opaque from error
    return (type(value), value)
