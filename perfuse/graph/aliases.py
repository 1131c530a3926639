"""Which values of a graph share memory, and how that memory is used.

AOTAutograd's graphs are functional except for the copies into mutated inputs at their end. Every
rewrite that replaces one value by another must check: would a result now share memory with
an input or another result, or be overwritten? Alias classes answer that.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from perfuse.graph.facts import is_known, output_nodes, tensor_of
from perfuse.graph.storage_ops import SEEING, Treatment, storage_treatment
from perfuse.torch_compat.ops import OpOverload, schema_of


@dataclass(slots=True)
class _Class:
    """One set of values in the same memory."""

    has_input: bool = False
    num_outputs: int = 0  # results of the graph, each counted once
    is_mutated: bool = False
    is_seen: bool = False  # an op accesses its storage, not only its elements

    def absorb(self, other: "_Class") -> None:
        self.has_input |= other.has_input
        self.num_outputs += other.num_outputs
        self.is_mutated |= other.is_mutated
        self.is_seen |= other.is_seen


def users_through(node: Node, is_view: Callable[[Node], bool]) -> Iterator[Node]:
    """Yield the users of a value and of its views, except the views; a user of both comes twice."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if user.op == "output" or not is_view(user):
                yield user
            elif user not in seen:
                seen.add(user)
                pending.append(user)


def aliased_inputs(node: Node) -> list[Node]:
    """The arguments whose memory the result of `node` may share."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if not isinstance(node.target, OpOverload):
        # getitem, arithmetic and `torch.cos` share at most their first argument; others, anything.
        return node.all_input_nodes[:1] if is_known(node) else list(node.all_input_nodes)
    if storage_treatment(node.target) is Treatment.HELD:
        return list(node.all_input_nodes)
    return _at(node, _schema_of(node.target).aliased)


def mutated_inputs(node: Node) -> list[Node]:
    """The arguments that `node` writes to, or might."""
    if not isinstance(node.target, OpOverload):
        return [] if is_known(node) else list(node.all_input_nodes)
    return _at(node, _schema_of(node.target).written)


@dataclass(frozen=True, slots=True)
class _Marks:
    """The arguments, by position and name, that an op's results may alias, or that it writes to."""

    aliased: tuple[tuple[int, str], ...]
    written: tuple[tuple[int, str], ...]
    returns_alias: bool


@cache
def _schema_of(op: OpOverload) -> _Marks:
    """The alias annotations of a schema, read once per op."""
    arguments = [(i, a.name, a.alias_info) for i, a in enumerate(schema_of(op).arguments)]
    marked = [(i, name, info.is_write) for i, name, info in arguments if info is not None]
    returns_alias = any(r.alias_info is not None for r in schema_of(op).returns)
    return _Marks(
        tuple((i, name) for i, name, _ in marked if returns_alias),
        tuple((i, name) for i, name, is_write in marked if schema_of(op).is_mutable and is_write),
        returns_alias,
    )


def _at(node: Node, places: tuple[tuple[int, str], ...]) -> list[Node]:
    """The nodes among the arguments at these places."""
    found: list[Node] = []
    for i, name in places:
        map_arg(node.args[i] if i < len(node.args) else node.kwargs.get(name), found.append)
    return found


@dataclass(slots=True)
class Aliases:
    """Alias classes of a graph's nodes, growing as a pass merges values (union-find)."""

    _parent: dict[Node, Node] = field(default_factory=dict)
    _class: dict[Node, _Class] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph) -> "Aliases":
        aliases = Aliases()
        for node in graph.nodes:
            aliases.add(node)
        for node in dict.fromkeys(output_nodes(graph)):
            aliases.of_node(node).num_outputs += 1
        return aliases

    def add(self, node: Node) -> None:
        """Add a node whose inputs are already known."""
        self._parent[node] = node
        self._class[node] = _Class(has_input=node.op in ("placeholder", "get_attr"))
        for source in aliased_inputs(node):
            self.join(node, source)
        for written in mutated_inputs(node):
            self.of_node(written).is_mutated = True
        if storage_treatment(node.target) in SEEING and isinstance(node.args[0], Node):
            self.of_node(node.args[0]).is_seen = True

    def add_with(self, node: Node, origin: Mapping[Node, Node]) -> None:
        """Add a node of another graph, whose inputs stand for `origin`'s nodes."""
        self._parent[node] = node
        self._class[node] = _Class()
        for source in aliased_inputs(node):
            self.join(node, origin[source])

    def root(self, node: Node) -> Node:
        while self._parent[node] is not node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def of_node(self, node: Node) -> _Class:
        return self._class[self.root(node)]

    def join(self, a: Node, b: Node) -> None:
        """From now on `a` and `b` are in the same memory."""
        root_a, root_b = self.root(a), self.root(b)
        if root_a is not root_b:
            self._parent[root_a] = root_b
            self._class[root_b].absorb(self._class[root_a])

    def keeps_storage(self, new: Node, old: Node) -> bool:
        """Whether ops that access the storage of `old` would see the same with `new`."""
        return self.root(new) is self.root(old) or not self.of_node(old).is_seen

    def can_stand_for(self, new: Node, old: Node) -> bool:
        """Whether every use of `old` may read `new`'s memory instead."""
        if self.root(new) is self.root(old):
            return True
        a, b = self.of_node(new), self.of_node(old)
        if a.is_mutated or b.is_mutated:
            return False
        # A result must not begin to share memory with an input or with another result, nor stop:
        # `old` takes along all results in its memory only if it is not a view itself.
        if b.num_outputs > 1 and aliased_inputs(old):
            return False
        return not (b.num_outputs and (a.has_input or a.num_outputs))


def is_view(node: Node) -> bool:
    """The node is a view of its input with another shape."""
    target = node.target
    return (
        isinstance(target, OpOverload)
        and not schema_of(target).is_mutable
        and _schema_of(target).returns_alias
        and isinstance(tensor_of(node), torch.Tensor)
    )
