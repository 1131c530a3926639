"""The one loop under every pass that replaces nodes by simpler ones.

A rule sees a node of the new graph, whose inputs are already simple, and offers another node for
it. Whether the offer is taken is decided here, once for all rules: type, device, shape and strides
must be the same, no result may begin to share memory with an input, and what an op sees of a
storage stays the same.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from perfuse.graph.aliases import Aliases
from perfuse.graph.blame import working_on
from perfuse.graph.copying import GraphCopy, copy_but_for
from perfuse.graph.facts import is_part, is_same_tensor, output_nodes, packet_name, tensor_of
from perfuse.torch_compat.graphs import last_node, module_of

MAX_STEPS = 16  # consecutive rewrites of one node; rules shrink, so this is only a safeguard


class NodeBuilder:
    """Makes new nodes, with their fake values, in front of where the sweep stands."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def call(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call that takes the place of `like`: it inherits all of its meta but the value."""
        node = self._graph.call_function(target, args, kwargs)
        given, named = map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta = {key: value for key, value in like.meta.items() if key != "val"}
        node.meta["val"] = target(*given, **named)
        return node

    def opaque(self, like: Node, target: Any, *args: Any) -> Node:
        """A call whose result only other calls can read; it is described as `like` is."""
        node = self._graph.call_function(target, args)
        node.meta = dict(like.meta)
        return node

    def attribute(self, like: Node, name: str, value: Any) -> Node:
        """An attribute of the new module, in place of `like`; `value` is fake."""
        node = self._graph.create_node("get_attr", name)
        node.meta = {**like.meta, "val": value}
        return node


Match = Callable[[Node, NodeBuilder], Node | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A description, the op packets it matches, and the function that proposes a replacement."""

    text: str
    packets: tuple[str, ...]
    offer: Match


def index_rules(rules: Sequence[Rule]) -> dict[str, list[Rule]]:
    """The rules by the packet they look at."""
    table: dict[str, list[Rule]] = {}
    for rule in rules:
        for packet in rule.packets:
            table.setdefault(packet, []).append(rule)
    return table


def rewrite(gm: GraphModule, rules: Mapping[str, Sequence[Rule]]) -> GraphModule:
    """A new module in which every rule has been applied as far as it goes."""
    if not any(packet_name(node) in rules for node in gm.graph.nodes):
        return gm
    return _Rewrite(gm, rules).run()


class _Rewrite:
    def __init__(self, gm: GraphModule, rules: Mapping[str, Sequence[Rule]]) -> None:
        self._gm = gm
        self._rules = rules
        self._copy = GraphCopy(gm.graph)
        self._new = self._copy.graph
        self._builder = NodeBuilder(self._new)
        self._aliases = Aliases.of(gm.graph)
        self._outputs = set(output_nodes(gm.graph))
        self._origin: dict[Node, Node] = {}  # new node -> old node of the same memory

    def run(self) -> GraphModule:
        for node in self._gm.graph.nodes:
            copied = self._copy.copy(node)
            self._origin[copied] = node
            with working_on(node):
                self._copy.of[node] = self._simplify(node, copied)
        return module_of(self._gm, self._new)

    def _simplify(self, old: Node, node: Node) -> Node:
        for _ in range(MAX_STEPS):
            mark = last_node(self._new)
            better = self._step(old, node)
            if better is None:
                return node
            if not node.users:
                self._erase(node)
                mark = node.prev if mark is node else mark
            if better not in _since(self._new, mark):
                return better  # an earlier node, which has had its turn
            node = better
        return node

    def _erase(self, node: Node) -> None:
        self._origin.pop(node, None)
        self._new.erase_node(node)

    def _step(self, old: Node, node: Node) -> Node | None:
        if tensor_of(node) is None or any("val" not in n.meta for n in node.all_input_nodes):
            return None
        for rule in self._rules.get(packet_name(node), ()):
            mark = last_node(self._new)
            offer = rule.offer(node, self._builder)
            if offer is None:
                continue
            self._adopt_since(mark)
            if self._is_acceptable(old, node, offer):
                self._aliases.join(old, self._origin[offer])
                return offer
            self._forget_since(mark)
        return None

    def _adopt_since(self, mark: Node) -> None:
        """Give nodes that a rule has made their class of aliases: as a stand-in old node."""
        for node in _since(self._new, mark):
            if node not in self._origin:
                self._origin[node] = node
                self._aliases.add_with(node, self._origin)

    def _forget_since(self, mark: Node) -> None:
        for node in reversed(list(_since(self._new, mark))):
            if not node.users:
                self._erase(node)

    def _is_acceptable(self, old: Node, node: Node, offer: Node) -> bool:
        wanted, given = tensor_of(node), tensor_of(offer)
        if wanted is None or given is None or not is_same_tensor(wanted, given):
            return False
        if offer.op in ("placeholder", "get_attr") and old in self._outputs:
            return False  # a caller can distinguish a result from its argument
        origin = self._origin[offer]
        return self._aliases.can_stand_for(origin, old) and self._aliases.keeps_storage(origin, old)


def _since(graph: Graph, mark: Node) -> list[Node]:
    """The nodes after `mark`, first to last."""
    found: list[Node] = []
    node = last_node(graph)
    while node is not mark:
        found.append(node)
        node = node.prev
    return found[::-1]


def scalar_of(value: Any) -> bool | int | float | complex | None:
    """The one number that an argument is everywhere: a Python number or a `full` of one."""
    if isinstance(value, (bool, int, float, complex)):
        return value
    if isinstance(value, Node) and packet_name(value) in ("full", "scalar_tensor"):
        fill = value.args[1] if packet_name(value) == "full" else value.args[0]
        return fill if isinstance(fill, (bool, int, float, complex)) else None
    return None


def dtype_of(node: Any) -> torch.dtype | None:
    tensor = tensor_of(node)
    return None if tensor is None else tensor.dtype


Found = TypeVar("Found")


def replace_calls(
    gm: GraphModule,
    found: Mapping[Node, Found],
    make: Callable[[Node, Found, NodeBuilder, dict[Node, Node]], Node],
    attributes: Mapping[str, Any] | None = None,
) -> GraphModule:
    """Rebuild each matched call, from its match and the copies so far."""
    if not found:
        return gm

    def made(node: Node, new: GraphCopy) -> Node:
        if node not in found:
            return new.copy(node)
        return make(node, found[node], NodeBuilder(new.graph), new.of)

    return copy_but_for(gm, made, attributes)


def replace_parts(
    gm: GraphModule,
    found: Collection[Node],
    make: Callable[[Node, Node, NodeBuilder, dict[Node, Node]], Node],
) -> GraphModule:
    """Rebuild each part of these calls by itself, but for calls that are also read as a whole."""
    parted = {call for call in found if all(map(is_part, call.users))}
    if not parted:
        return gm

    def made(node: Node, new: GraphCopy) -> Node | None:
        if node in parted:
            return None
        call = node.args[0] if is_part(node) else None
        if not isinstance(call, Node) or call not in parted:
            return new.copy(node)
        return make(node, call, NodeBuilder(new.graph), new.of)

    return copy_but_for(gm, made)
