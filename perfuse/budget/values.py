"""A joint graph as numbers: the properties of each node, computed once for many walks."""

from dataclasses import dataclass

from torch.fx import Node

from perfuse.graph.aliases import Aliases, is_view, users_through
from perfuse.graph.facts import is_part, is_sym
from perfuse.graph.partition import Joint
from perfuse.graph.saving.choose import user_policy
from perfuse.graph.saving.costs import Work, is_tuple, num_bytes, num_flops, work_of
from perfuse.graph.saving.ties import compared_with_themselves


@dataclass(frozen=True, slots=True)
class Values:
    """The nodes of a joint graph by number, in its order."""

    nodes: tuple[Node, ...]
    number: dict[Node, int]
    inputs: tuple[tuple[int, ...], ...]
    num_bytes: tuple[int, ...]  # 0 for views, sizes, tuples, and what the caller holds
    root: tuple[int, ...]  # the value whose memory this one aliases, or itself
    num_flops: tuple[int, ...]
    is_product: tuple[bool, ...]
    is_stored: tuple[bool, ...]  # goes to memory wherever it is computed
    can_recompute: tuple[bool, ...]  # its inputs can be kept instead of it
    must_recompute: tuple[bool, ...]  # by the user's checkpoint
    forward: tuple[bool, ...]  # runs in the forward
    backward: tuple[int, ...]  # what must run in the backward, in order
    first_reads: tuple[int, ...]  # values independent of tangents that the backward reads
    results: frozenset[int]
    gradients: frozenset[int]

    @staticmethod
    def of(joint: Joint) -> "Values":
        graph, roles = joint.module.graph, joint.roles
        nodes = tuple(n for n in graph.nodes if n.op != "output")
        number = {node: i for i, node in enumerate(nodes)}
        work = [work_of(n) if n.op == "call_function" else Work.FREE for n in nodes]
        read = {n for node in roles.backward for n in node.all_input_nodes}
        read.update(roles.gradients)
        return Values(
            nodes=nodes,
            number=number,
            inputs=tuple(tuple(number[i] for i in n.all_input_nodes) for n in nodes),
            num_bytes=tuple(_own_bytes(n) for n in nodes),
            root=_roots(nodes, number),
            num_flops=tuple(num_flops(n) if n.op == "call_function" else 0 for n in nodes),
            is_product=tuple(work_of(_maker(n)) >= Work.PRODUCT for n in nodes),
            is_stored=tuple(_is_stored(n, w) for n, w in zip(nodes, work, strict=True)),
            can_recompute=_recomputable(joint, nodes, work),
            must_recompute=tuple(user_policy(n) == "MUST_RECOMPUTE" for n in nodes),
            forward=tuple(n in roles.forward and n.op == "call_function" for n in nodes),
            backward=tuple(number[n] for n in nodes if n in roles.backward),
            first_reads=tuple(sorted(number[n] for n in read if n not in roles.backward)),
            results=frozenset(number[n] for n in roles.results),
            gradients=frozenset(number[n] for n in roles.gradients),
        )

    def held_bytes(self, v: int) -> int:
        """The bytes that are held with a value: a view keeps its base alive."""
        return self.num_bytes[self.root[v]]


def _own_bytes(node: Node) -> int:
    is_made = node.op == "call_function" and not is_sym(node) and not is_view(node)
    return num_bytes(node) if is_made else 0


def _roots(nodes: tuple[Node, ...], number: dict[Node, int]) -> tuple[int, ...]:
    roots: list[int] = []
    for v, node in enumerate(nodes):
        looks = node.op == "call_function" and is_view(node) and bool(node.all_input_nodes)
        roots.append(roots[number[node.all_input_nodes[0]]] if looks else v)
    return tuple(roots)


def _maker(node: Node) -> Node:
    """The call behind one of its results."""
    return node.all_input_nodes[0] if is_part(node) else node


def _is_stored(node: Node, work: Work) -> bool:
    """A library call's result is in memory, and so is what one reads; the rest may be fused."""
    if node.op != "call_function" or is_view(node) or is_sym(node):
        return False
    if work >= Work.PASS or is_part(node):
        return True
    users = users_through(node, is_view)
    return any(user.op == "output" or work_of(user) >= Work.PRODUCT for user in users)


def _recomputable(joint: Joint, nodes: tuple[Node, ...], work: list[Work]) -> tuple[bool, ...]:
    aliases = Aliases.of(joint.module.graph)
    for node in joint.roles.overwritten:
        aliases.of_node(node).is_mutated = True
    compared = compared_with_themselves(joint.module.graph)
    can: dict[Node, bool] = {}
    for node, cost in zip(nodes, work, strict=True):
        is_free = cost < Work.NEVER and not is_sym(node) and user_policy(node) != "MUST_SAVE"
        can[node] = node.op == "call_function" and is_free and node not in compared
        # A tuple is never saved: its parts can be recomputed if it can.
        can[node] = can[node] and all(
            not aliases.of_node(n).is_mutated and (not is_tuple(n) or can[n])
            for n in node.all_input_nodes
        )
    return tuple(can[node] for node in nodes)
