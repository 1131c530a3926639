"""Which values the forward keeps for the backward, and which the backward computes again.

Start with every value that backward work reads. Then, from the last to the first, move the cut
up: a cheap value (pointwise, a view, a cast) is replaced by what its chain of cheap work starts
from, or else by its inputs, when that keeps no more bytes: because they are kept anyway, are the
caller's own, or are smaller. Linear in the graph; the result never keeps more than the start.
"""

from collections.abc import Iterable
from typing import Any

from torch.fx import Graph, Node

from perfuse.graph.aliases import Aliases
from perfuse.graph.facts import is_pure, is_sym
from perfuse.graph.saving.costs import num_bytes, num_flops, work_of
from perfuse.graph.saving.policy import SavePolicy
from perfuse.graph.saving.roles import Roles, is_tagged_backward

MAX_SWEEPS = 4
MAX_CHAIN = 64  # how far back a chain of cheap work is followed

# A norm's input and its per-row statistics are a little more than the normalised tensor, but they
# exist anyway, and it would have to be written. One part in this many is the price allowed.
SLACK = 16


class _Cut:
    """The kept values while they are being chosen."""

    def __init__(self, graph: Graph, roles: Roles, policy: SavePolicy) -> None:
        self._nodes: list[Node] = list(graph.nodes)
        self._roles = roles
        self._policy = policy
        self._aliases = Aliases.of(graph)
        for node in roles.overwritten:
            self._aliases.of_node(node).is_mutated = True
        self._bytes: dict[Node, int] = {}
        self._recomputable: dict[Node, bool] = {}
        self.kept = self._read_by_backward()

    def _read_by_backward(self) -> set[Node]:
        """Values from before the tangents that backward work, or a gradient itself, reads."""
        read = {n for node in self._roles.backward for n in node.all_input_nodes}
        read.update(self._roles.gradients)
        return {n for n in read if n not in self._roles.backward and n.op != "get_attr"}

    def bytes_of(self, node: Node) -> int:
        if node.op in ("placeholder", "get_attr"):
            return 0  # the caller's: alive whatever we do
        if node not in self._bytes:
            self._bytes[node] = num_bytes(node)
        return self._bytes[node]

    def total(self, nodes: Iterable[Node]) -> int:
        return sum(self.bytes_of(node) for node in nodes)

    def can_recompute(self, node: Node) -> bool:
        """Its inputs can be kept instead of it, and will still hold what they hold now."""
        if node not in self._recomputable:
            self._recomputable[node] = self._find_recomputable(node)
        return self._recomputable[node]

    def _find_recomputable(self, node: Node) -> bool:
        if not (_may_recompute(node, self._policy) or _is_checkpointed(node)):
            return False
        return not any(
            self._aliases.of_node(n).is_mutated or _is_tuple(n) for n in node.all_input_nodes
        )

    def sweep(self) -> bool:
        """One move of the cut from the last node to the first; whether anything moved."""
        has_moved = False
        for node in reversed(self._nodes):
            if node not in self.kept or not self.can_recompute(node):
                continue
            options = (self._roots(node), self._narrowest(node), set(node.all_input_nodes))
            # The least of them: a mask of bytes is narrower than the floats it came from.
            sources = min((o for o in options if o is not None), key=self._added)
            if self._pays(node, sources):
                self.kept.remove(node)
                self.kept.update(n for n in sources if n.op != "get_attr")
                has_moved = True
        return has_moved

    def _roots(self, node: Node) -> set[Node] | None:
        """Where the chain of cheap work behind `node` starts; None if that is far away."""
        roots: set[Node] = set()
        seen: set[Node] = set()
        stack = list(node.all_input_nodes)
        while stack:
            source = stack.pop()
            if source in seen:
                continue
            seen.add(source)
            if source in self.kept or not self.can_recompute(source):
                roots.add(source)
            else:
                stack.extend(source.all_input_nodes)
            if len(seen) > MAX_CHAIN:
                return None
        return roots

    def _narrowest(self, start: Node) -> set[Node] | None:
        """The smallest value on the way back from `start`, as far as there is only one way."""
        best = node = start
        for _ in range(MAX_CHAIN):
            ways = [n for n in node.all_input_nodes if self.bytes_of(n) > 0]
            if not self.can_recompute(node) or len(ways) != 1:
                break
            node = ways[0]
            if self.bytes_of(node) < self.bytes_of(best):
                best = node
        return None if best is start else {best}

    def _added(self, sources: set[Node]) -> int:
        """The bytes of those that are not kept yet."""
        return self.total(n for n in sources if n not in self.kept)

    def _pays(self, node: Node, sources: set[Node]) -> bool:
        if _is_checkpointed(node) or node.name in self._policy.must_recompute:
            return True  # the user asked for it
        cost = self._added(sources)
        gain = self.bytes_of(node)
        # x + f(x), with x kept: keeping f(x) instead of the sum is no less, and one read more.
        is_second_read = self.total(n for n in sources if n in self.kept) > gain // SLACK
        return cost == 0 if is_second_read else cost <= gain + gain // SLACK

    def drop_derivable(self) -> None:
        """What can be computed from other kept values is not kept."""
        known: set[Node] = set()
        for node in self._nodes:
            is_free = node.op == "get_attr"
            is_derived = self.can_recompute(node) and all(n in known for n in node.all_input_nodes)
            if is_derived and not is_sym(node):
                self.kept.discard(node)
            if is_free or is_derived or node in self.kept or self._is_lasting_input(node):
                known.add(node)

    def _is_lasting_input(self, node: Node) -> bool:
        """A primal that nobody overwrites can be kept for nothing."""
        is_primal = node.op == "placeholder" and node not in self._roles.backward
        is_tangent = "tangents" in str(node.target)
        return is_primal and not is_tangent and not self._aliases.of_node(node).is_mutated

    def frontier(self) -> set[Node]:
        """The values at which a walk back from the backward's work stops: what it really reads."""
        found: set[Node] = set()
        seen: set[Node] = set()
        stack = list(self._read_by_backward())
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.kept or not self.can_recompute(node):
                if node.op != "get_attr":
                    found.add(node)
            else:
                stack.extend(node.all_input_nodes)
        return found


def _may_recompute(node: Node, policy: SavePolicy) -> bool:
    """The policy lets the backward compute it."""
    if node.op in ("placeholder", "get_attr", "output") or node.name in policy.must_save:
        return False
    if not is_pure(node) or is_sym(node):
        return False
    if node.name in policy.must_recompute:
        return True
    limit = policy.max_recompute_flops
    return work_of(node) <= policy.level and (limit is None or num_flops(node) <= limit)


def _is_tuple(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _is_checkpointed(node: Node) -> bool:
    """The user's checkpoint wants it recomputed, and it is no value a later region starts from."""
    policy: Any = node.meta.get("recompute")
    if getattr(policy, "name", "") not in ("MUST_RECOMPUTE", "PREFER_RECOMPUTE"):
        return False
    region = node.meta.get("ac_graph_id")
    readers = (n for n in node.users if n.op != "output" and not is_tagged_backward(n))
    return is_pure(node) and all(n.meta.get("ac_graph_id") == region for n in readers)


def choose_saved(graph: Graph, roles: Roles, policy: SavePolicy) -> list[Node]:
    """The values to keep, in the order of the graph."""
    cut = _Cut(graph, roles, policy)
    plain = set(cut.kept)
    for _ in range(MAX_SWEEPS):
        if not cut.sweep():
            break
    cut.drop_derivable()
    chosen = cut.frontier()
    is_asked_for = any("recompute" in node.meta for node in graph.nodes) or policy.must_recompute
    if cut.total(chosen) > cut.total(plain) + cut.total(plain) // SLACK and not is_asked_for:
        chosen = plain
    return [node for node in graph.nodes if node in chosen]
