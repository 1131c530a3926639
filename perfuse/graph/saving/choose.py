"""Which values the forward saves for the backward, and which the backward recomputes.

A minimum cut. Each value that does not depend on tangents is either known in the forward only or in
the backward too. Flow runs from what only the forward can make to what the backward reads, and a
cut through it is a choice:

    source --- what recomputing v costs ---> v in --- what keeping v costs ---> v out ---> readers

A value that may not be recomputed has an infinite first edge. Keeping costs bytes, recomputing a
small part of that: bytes decide, and among equals the least work.
"""

from collections.abc import Iterable
from typing import Any

from torch.fx import Graph, Node

from perfuse.graph.aliases import Aliases, is_view
from perfuse.graph.facts import EARLY, is_pure, is_sym, reached, tensor_of
from perfuse.graph.saving.casts import casts_for_both_halves
from perfuse.graph.saving.costs import (
    Work,
    is_cheap,
    is_tuple,
    num_bytes,
    num_elements,
    recompute_cost,
    work_of,
)
from perfuse.graph.saving.min_cut import INFINITE, SINK, SOURCE, Network
from perfuse.graph.saving.roles import Roles, is_tagged_backward
from perfuse.graph.saving.ties import compared_with_themselves
from perfuse.graph.saving.unread_results import in_unread_results

# The longest run of recomputed values, each computed from the one before. A longer one would have
# to be redone from its start, and be in memory whole, before the backward can take its first step.
MAX_CHAIN = 64

# A norm's input and its per-row statistics are a little more than the normalised tensor, but they
# exist anyway, and it would have to be written. A write costs this fraction.
SLACK = 16

# A result belongs to the caller too: it adds nothing while the caller holds it, who may drop it.
SHARE_OF_A_RESULT = 0.5

# Values that come from more tensors than this count as tensors of their own.
MAX_ORIGINS = 8

# What the user wants recomputed, or may change, is saved only if there is no other way.
UNWANTED = 1000


def choose_saved(graph: Graph, roles: Roles, level: int) -> list[Node]:
    """The values to save, in the order of the graph; at a higher level at most as many bytes.

    0  only views are recomputed: what the backward reads is saved
    1  and what fuses into a loop: pointwise work, casts, masks
    2  and single passes over memory: reductions, gathers, scans
    3  and matmuls, convolutions and attention: all but random values, effects, collectives
    """
    levels = range(min(level, Work.LOOP), level + 1)
    choices = [_kept_under(graph, roles, limit) for limit in levels]
    # What a higher level may do costs something, so its cut could be cheaper and yet larger.
    kept = min(choices, key=lambda nodes: sum(map(kept_bytes, nodes)))
    return [node for node in graph.nodes if node in kept]


def _kept_under(graph: Graph, roles: Roles, level: int) -> set[Node]:
    problem = _Problem(graph, roles, level)
    recomputed = _least_cut(problem, frozenset())
    too_far = _chain_ends(problem, recomputed)
    if too_far:
        recomputed = _least_cut(problem, too_far)
    return problem.frontier(recomputed)


class _Problem:
    """The properties of each value of a joint graph that the cut needs."""

    def __init__(self, graph: Graph, roles: Roles, level: int) -> None:
        self.nodes: list[Node] = list(graph.nodes)
        self._roles = roles
        self._level = level
        self._compared = compared_with_themselves(graph)
        self._cast_once = casts_for_both_halves(graph, roles) if level <= Work.LOOP else ()
        self._aliases = Aliases.of(graph)
        for node in roles.overwritten:
            self._aliases.of_node(node).is_mutated = True
        self._recomputable: dict[Node, bool] = {}
        self._stored = self._find_stored()
        self._results = {self._stored.get(node, node) for node in roles.results}
        self._unread = in_unread_results(graph)
        self._more_reads = self._find_more_reads()
        self.read = self._read_by_backward()

    def _read_by_backward(self) -> set[Node]:
        """Values from before the tangents that backward work, or a gradient itself, reads."""
        read = {n for node in self._roles.backward for n in node.all_input_nodes}
        read.update(self._roles.gradients)
        return {n for n in read if n not in self._roles.backward and n.op != "get_attr"}

    def can_recompute(self, node: Node) -> bool:
        """The level lets the backward compute it, and its inputs will still have their values."""
        if node not in self._recomputable:
            self._recomputable[node] = self._may_recompute(node) and not any(
                self._aliases.of_node(n).is_mutated or (is_tuple(n) and not self.can_recompute(n))
                for n in node.all_input_nodes
            )
        return self._recomputable[node]

    def _may_recompute(self, node: Node) -> bool:
        if node.op != "call_function" or is_sym(node) or not is_pure(node):
            return False
        if node in self._compared or node in self._cast_once or node.meta.get(EARLY):
            return False
        if user_policy(node) in ("MUST_SAVE", "PREFER_SAVE"):
            return False
        is_backwards_own = node not in self._roles.forward and is_cheap(node)
        return _is_checkpointed(node) or is_backwards_own or work_of(node) <= self._level

    def keep_cost(self, node: Node) -> float:
        if is_tuple(node):
            return INFINITE  # its parts can be kept, it cannot
        if node in self._stored:
            whole = self._stored[node]
            cost = float(kept_bytes(whole))  # of a part of it, all stays
            if whole in self._results:
                cost *= SHARE_OF_A_RESULT
        else:
            cost = kept_bytes(node) * (1 + 1 / SLACK)
        # A change of a result in place by the caller would make the backward fail.
        is_unwanted = _is_checkpointed(node) or self._is_in_unread_result(node)
        if is_unwanted and self.can_recompute(node):
            cost *= UNWANTED
        return cost

    def _is_in_unread_result(self, node: Node) -> bool:
        return node in self._unread and self.can_recompute(self._unread[node])

    def recompute_cost(self, node: Node) -> float:
        if not self.can_recompute(node):
            return INFINITE
        if _is_checkpointed(node) or node not in self._roles.forward:
            return 0.0  # asked for, or computed once whichever half does it
        return recompute_cost(node) + self._more_reads.get(node, 0) * num_bytes(node) / SLACK

    def _find_more_reads(self) -> dict[Node, int]:
        """How many tensors a loop reads for a value that it would not read for any one input of it.

        x + f(x) reads no more than x; the sum of two products reads both, and a kept sum is one.
        """
        more: dict[Node, int] = {}
        origins: dict[Node, frozenset[Node]] = {}  # what must be in memory to compute it in a loop
        for node in self.nodes:
            if node in self._roles.backward or not self.can_recompute(node):
                continue
            large = [n for n in _sources(node) if num_elements(n) * 2 >= num_elements(node)]
            parts = [origins.get(n, frozenset({n})) for n in large]
            together = frozenset[Node]().union(*parts)
            origins[node] = together if len(together) <= MAX_ORIGINS else frozenset({node})
            more[node] = len(together) - max(map(len, parts), default=0)
        return more

    def _find_stored(self) -> dict[Node, Node]:
        """The values that the forward stores, saved or not, and the value that owns the memory."""
        stored: dict[Node, Node] = {}
        depth: dict[Node, int] = {}  # library calls on the longest way here
        for node in self.nodes:
            depth[node] = max((depth[n] for n in node.all_input_nodes), default=0)
            depth[node] += node.op == "call_function" and work_of(node) >= Work.PRODUCT
        for node in self.nodes:
            if node not in self._roles.forward:
                continue
            source = node.all_input_nodes[0] if is_view(node) else None
            readers = [n for n in node.users if n in self._roles.forward or n.op == "output"]
            if source in stored:
                stored[node] = stored[source]
            elif node.op == "placeholder" or work_of(node) >= Work.PASS:
                stored[node] = node
            elif any(n.op == "output" or depth[n] > depth[node] for n in readers):
                stored[node] = node  # by the time it is read a library has been called
        return stored

    def frontier(self, recomputed: set[Node]) -> set[Node]:
        """The values at which a walk back from the backward's work stops: what it really reads."""
        seen = reached(self.read, lambda node: node.all_input_nodes if node in recomputed else ())
        return {node for node in seen if node not in recomputed and node.op != "get_attr"}


def _sources(node: Node) -> Iterable[Node]:
    """The values that a node is made of: no constants and no sizes."""
    return (n for n in node.all_input_nodes if n.op != "get_attr" and not is_sym(n))


def kept_bytes(node: Node) -> int:
    """The bytes that saving it adds: none for a size or for memory that the caller owns."""
    return 0 if node.op == "placeholder" or tensor_of(node) is None else num_bytes(node)


def _least_cut(problem: _Problem, forced: frozenset[Node]) -> set[Node]:
    """The values to recompute, none of them `forced` to be kept."""
    network = Network()
    before: dict[Node, int] = {}  # `v in`, for values that may be recomputed
    after: dict[Node, int] = {}  # `v out`
    starts = [n for n in problem.read if not is_sym(n)]
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node in after:
            continue
        after[node] = network.vertex()
        cost = INFINITE if node in forced else problem.recompute_cost(node)
        if cost == INFINITE:
            network.edge(SOURCE, after[node], problem.keep_cost(node))
            continue
        before[node] = network.vertex()
        network.edge(SOURCE, before[node], cost)
        network.edge(before[node], after[node], problem.keep_cost(node))
        stack.extend(_sources(node))
    for node, vertex in before.items():
        for source in _sources(node):
            network.edge(after[source], vertex, INFINITE)
    for node in starts:
        network.edge(after[node], SINK, INFINITE)
    if not before:
        return set()
    is_before_cut = network.source_side(sum(problem.keep_cost(n) for n in starts))
    return {node for node, vertex in before.items() if not is_before_cut[vertex]}


def _chain_ends(problem: _Problem, recomputed: set[Node]) -> frozenset[Node]:
    """Values at which runs of recomputed ones would grow too long; views do not count."""
    lengths: dict[Node, int] = {}
    ends: set[Node] = set()
    for node in problem.nodes:
        if node in recomputed:
            length = max((lengths.get(n, 0) for n in node.all_input_nodes), default=0)
            length += work_of(node) is not Work.FREE
            if length > MAX_CHAIN and not is_tuple(node) and not _is_checkpointed(node):
                ends.add(node)
                length = 0
            lengths[node] = length
    return frozenset(ends)


def user_policy(node: Node) -> str:
    """The policy of the user's checkpoint for this value, "" if there is none."""
    policy: Any = node.meta.get("recompute")
    return str(getattr(policy, "name", ""))


def _is_checkpointed(node: Node) -> bool:
    """The user's checkpoint wants it recomputed, and no later region starts from it."""
    if user_policy(node) not in ("MUST_RECOMPUTE", "PREFER_RECOMPUTE"):
        return False
    region = node.meta.get("ac_graph_id")
    readers = (n for n in node.users if n.op != "output" and not is_tagged_backward(n))
    return is_pure(node) and all(n.meta.get("ac_graph_id") == region for n in readers)
